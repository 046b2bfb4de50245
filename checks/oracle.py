"""Oracle: compares each token with the choice of `transformers` for the delivered prefix (teacher forcing).

Each delivered token must be the greedy choice of the reference after the delivered prefix. If the best logits differ by
at most `NEAR_TIE`, rounding may decide. Such tokens are counted, and the caller limits their share.

With quantised KV or activations, the reference rounds as specified. A value between two codes may be rounded either
way, which changes logits more than float rounding. The tolerance is therefore `ROUNDED_TIE`, or `INT4_TIE` for int4 KV,
whose codes are further apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

NEAR_TIE = 1e-3
ROUNDED_TIE = 5e-2
INT4_TIE = 0.3


@dataclass(slots=True)
class Tally:
    """Number of compared tokens, and number of near ties that were decided differently."""

    tokens: int = 0
    near_ties: int = 0


class RoundedCache(DynamicCache):
    """Keys and values in int8 or fp8, rounded with the scale of each head's largest element, or in int4.

    In int4, each group of 32 elements is rounded to 16 values between its smallest and its largest element.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store rounded keys and values, and return all of the layer."""
        return super().update(self._rounded(key_states), self._rounded(value_states), *args, **kwargs)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self._kind == "int4":
            groups = x.unflatten(-1, (-1, 32))  # type: ignore[no-untyped-call]
            least = groups.amin(-1, keepdim=True)
            scale = ((groups.amax(-1, keepdim=True) - least) / 15).half().float().clamp(min=1e-30)
            least = least.half().float()
            rounded: torch.Tensor = ((groups - least) / scale).round().clamp(0, 15) * scale + least
            return rounded.flatten(-2)
        most = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        if self._kind == "int8":
            return (x * (127 / most)).round() * (most / 127)
        return (x * (448 / most)).to(torch.float8_e4m3fn).float() * (most / 448)


class Oracle:
    """A checkpoint in `transformers`, in float32; `kv` is the KV cache type: "auto", "int8", "fp8" or "int4"."""

    def __init__(self, checkpoint: Path, *, kv: str = "auto", tie: float = NEAR_TIE) -> None:
        # A small model gains nothing from a second thread, and on busy cores each barrier waits for it.
        torch.set_num_threads(1)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=torch.float32,
            # Use eager attention, because the faster implementations in some versions of transformers ignore the soft
            # cap.
            attn_implementation="eager",
        )
        self.model = model.train(False)
        self.checkpoint = checkpoint
        self._kv = kv
        self._tie = tie if kv == "auto" else max(tie, INT4_TIE if kv == "int4" else ROUNDED_TIE)
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        eos = config.eos_token_id
        self.eos_token_ids: list[int] = eos if isinstance(eos, list) else [eos]

    def check_greedy(self, prompt: Sequence[int], delivered: Sequence[int], tally: Tally) -> None:
        """Assert that `delivered` is a greedy continuation of `prompt`, and count near ties."""
        with torch.inference_mode():
            cache = None if self._kv == "auto" else RoundedCache(self._kv)
            logits = self.model(torch.tensor([[*prompt, *delivered]]), past_key_values=cache).logits[0]
        picks = logits[len(prompt) - 1 : -1].float()
        best = picks.max(dim=-1).values
        chosen = picks[torch.arange(len(delivered)), torch.tensor(delivered)]
        for index, (gap, token) in enumerate(zip((best - chosen).tolist(), delivered, strict=True)):
            tally.tokens += 1
            if token == int(picks[index].argmax()):
                continue
            assert gap <= self._tie, (
                f"token {index} of {len(delivered)} after a prompt of {len(prompt)} is {token}, the reference says"
                f" {int(picks[index].argmax())} by {gap:.4f}"
            )
            tally.near_ties += 1
