"""The oracle: what `transformers` itself generates from a checkpoint, and how far an answer may be from it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

NEAR_TIE = 1e-3
"""Two logits so close may be ordered either way by floating point."""


@dataclass(slots=True)
class Verdict:
    """How an answer compares."""

    num_tokens: int = 0
    near_ties: int = 0


class Oracle:
    """Greedy generation of one checkpoint."""

    def __init__(self, source: Path | PreTrainedModel) -> None:
        # Use eager attention, because the SDPA path of transformers 5.17 ignores Gemma-2's soft cap.
        model: PreTrainedModel = (
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
            if isinstance(source, Path)
            else source
        )
        self._model = model.eval()  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def generate(self, prompt: list[int], count: int) -> list[int]:
        """The `count` greedy tokens after `prompt`."""
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def judge(self, prompt: list[int], answer: list[int], verdict: Verdict) -> None:
        """Check that each token, given those before it, is the greedy one or a near tie, and count the ties."""
        verdict.num_tokens += len(answer)
        if answer == self.generate(prompt, len(answer)):
            return
        logits = self._model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        worst = int(behind.argmax())
        assert behind[worst] <= NEAR_TIE, (
            f"token {worst} after a prompt of {len(prompt)} is {answer[worst]}, which is {behind[worst]:.4f} behind"
        )
        verdict.near_ties += int((behind > 0).sum())
