"""The oracle: the choice of `transformers` for each token, given the delivered prefix (teacher-forced).

Each delivered token must be the greedy pick of the reference after the delivered prefix. Where the best logits lie
within `NEAR_TIE` of each other, floating point decides; those are counted, and the caller bounds their share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

NEAR_TIE = 1e-3


@dataclass(slots=True)
class Tally:
    """How many tokens were compared, and how many were near ties that went the other way."""

    tokens: int = 0
    near_ties: int = 0


class Oracle:
    """A checkpoint as plain `transformers` runs it, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=torch.float32,
            # The plainest path: some versions of transformers drop a soft cap on the faster ones.
            attn_implementation="eager",
        )
        self.model = model.train(False)
        self.checkpoint = checkpoint
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        eos = config.eos_token_id
        self.eos_token_ids: list[int] = eos if isinstance(eos, list) else [eos]

    def check_greedy(self, prompt: Sequence[int], delivered: Sequence[int], tally: Tally) -> None:
        """Asserts that `delivered` is a greedy continuation of `prompt`, and counts near ties."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *delivered]])).logits[0]
        picks = logits[len(prompt) - 1 : -1].float()
        best = picks.max(dim=-1).values
        chosen = picks[torch.arange(len(delivered)), torch.tensor(delivered)]
        for index, (gap, token) in enumerate(zip((best - chosen).tolist(), delivered, strict=True)):
            tally.tokens += 1
            if token == int(picks[index].argmax()):
                continue
            assert gap <= NEAR_TIE, (
                f"token {index} of {len(delivered)} after a prompt of {len(prompt)} is {token}, the reference says"
                f" {int(picks[index].argmax())} by {gap:.4f}"
            )
            tally.near_ties += 1
