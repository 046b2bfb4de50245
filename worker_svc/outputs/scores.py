"""Log-probabilities for sampled tokens and prompt tokens, in rows that request them.

They are computed from the model's own logits, before rules and grammars change these. Other rows cost nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.interface.arrays import Int32Array, IntArray
from worker_svc.interface.result import Scores

_LINES = 256
"""Number of tokens scored at a time, which bounds the temporary memory."""
_MOST_LINES = 4096
"""Prompt tokens per section. The core forwards each as one message, and front ends have a smaller frame limit."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch's sampling rows that need log-probabilities; valid until the batch's rows change."""

    index: torch.Tensor
    """`[R] int64`: indices of the rows' tokens in the batch; a row with drafts has several."""
    places: IntArray
    """`index` on the host."""
    rows: tuple[int, ...]
    generations: tuple[int, ...]
    counts: tuple[int, ...]
    """Number of most likely tokens that each row requests."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One row's prompt tokens whose log-probabilities a chunk computes."""

    row: int
    generation: int
    count: int
    """Number of most likely tokens requested."""
    first_index: int
    """Index of the first token in the prompt."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceScores:
    """Log-probabilities of n tokens, on the device."""

    logprobs: torch.Tensor
    """`[n] float32`."""
    ranks: torch.Tensor
    """`[n] int32`."""
    top_ids: torch.Tensor
    """`[n, k] int32`."""
    top_logprobs: torch.Tensor
    """`[n, k] float32`."""

    def packed(self) -> torch.Tensor:
        """Return all tensors packed as `[n, 2 + 2k] int32`, for one copy to the host."""
        floats = torch.cat((self.logprobs.unsqueeze(1), self.top_logprobs), dim=1).view(torch.int32)
        return torch.cat((self.ranks.unsqueeze(1), self.top_ids, floats), dim=1)


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> DeviceScores:
    """Return the log-probabilities for `tokens` `[n]` and for the `count` most likely ones, from `[n, vocab_size]`."""
    parts = [
        _score(logits[start : start + _LINES].to(torch.float32), tokens[start : start + _LINES], count)
        for start in range(0, len(tokens), _LINES)
    ]
    if len(parts) == 1:
        return parts[0]
    return DeviceScores(
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_logprobs=torch.cat([part.top_logprobs for part in parts]),
    )


def _score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> DeviceScores:
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    top = logits.topk(min(count, logits.shape[1]), dim=-1)
    return DeviceScores(
        logprobs=(chosen - normalizer).squeeze(1),
        ranks=((logits > chosen).sum(dim=-1) + 1).to(torch.int32),
        top_ids=top.indices.to(torch.int32),
        top_logprobs=top.values - normalizer,
    )


def sections(
    lines: Int32Array, sampled: Wanted | None, counted: npt.NDArray[np.bool_], prompts: tuple[PromptPart, ...]
) -> Scores:
    """Return packed scores with their sections: one per sampled token, then those for the prompts.

    Args:
        lines: `[n, 2 + 2k] int32`, the result of `DeviceScores.packed`.
        sampled: the rows whose sampled token was scored.
        counted: `[S]`: whether each sampled token counts, which requires that neither its row nor a draft before it
            failed.
        prompts: the parts of prompts that were scored.
    """
    found = []
    line = 0
    if sampled is not None:
        kept = counted[sampled.places].tolist()
        for row, generation, count, is_kept in zip(
            sampled.rows, sampled.generations, sampled.counts, kept, strict=True
        ):
            if is_kept:
                found.append((row, generation, 0, count, line, 1))
            line += 1
    for part in prompts:
        for start in range(0, part.num_tokens, _MOST_LINES):
            length = min(_MOST_LINES, part.num_tokens - start)
            found.append((part.row, part.generation, part.first_index + start, part.count, line + start, length))
        line += part.num_tokens
    rows, generations, prompt_indices, counts, firsts, num_tokens = zip(*found, strict=True) if found else ((),) * 6
    return Scores(
        rows=rows,
        generations=generations,
        prompt_indices=prompt_indices,
        counts=counts,
        firsts=firsts,
        num_tokens=num_tokens,
        lines=lines,
    )
