"""Log-probabilities of sampled tokens and of prompt tokens, for the rows that request them.

They are computed from the model's own logits, before rules and grammars change these. Other rows cost nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from protos.quire.plan.v1 import plan_pb2
from shared.columns import Int32Array

_LINES = 256
"""Number of tokens scored at a time, which bounds the temporary memory."""
_MESSAGE_LINES = 4096
"""Prompt tokens per message. The core forwards messages, and front ends have a smaller frame limit."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Sampling rows of a batch that need log-probabilities; valid until the rows of the batch change."""

    index: torch.Tensor
    """`[R] int64`: places of the rows in the batch."""
    rows: tuple[int, ...]
    generations: tuple[int, ...]
    counts: tuple[int, ...]
    """Number of most likely tokens that each row requests."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens of one row whose log-probabilities a chunk gives."""

    row: int
    generation: int
    count: int
    """Number of most likely tokens requested."""
    first_index: int
    """Index of the first token in the prompt."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
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


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Scores:
    """Return the log-probabilities of `tokens` `[n]` and of the `count` most likely ones, from `[n, vocab_size]`."""
    parts = [
        _score(logits[start : start + _LINES].to(torch.float32), tokens[start : start + _LINES], count)
        for start in range(0, len(tokens), _LINES)
    ]
    if len(parts) == 1:
        return parts[0]
    return Scores(
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_logprobs=torch.cat([part.top_logprobs for part in parts]),
    )


def _score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Scores:
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    top = logits.topk(min(count, logits.shape[1]), dim=-1)
    return Scores(
        logprobs=(chosen - normalizer).squeeze(1),
        ranks=((logits > chosen).sum(dim=-1) + 1).to(torch.int32),
        top_ids=top.indices.to(torch.int32),
        top_logprobs=top.values - normalizer,
    )


def encode(
    packed: Int32Array, sampled: Wanted | None, alive: "set[tuple[int, int]]", prompts: tuple[PromptPart, ...]
) -> Iterator[plan_pb2.RowScores]:
    """Yield the messages for packed scores: first one per sampling row, then those of the prompts.

    Args:
        packed: `[n, 2 + 2k] int32`, the result of `Scores.packed`.
        sampled: the rows whose sampled token was scored.
        alive: (row, generation) of the rows that have not failed.
        prompts: the parts of prompts that were scored.
    """
    line = 0
    for row, generation, count in (
        () if sampled is None else zip(sampled.rows, sampled.generations, sampled.counts, strict=True)
    ):
        if (row, generation) in alive:
            yield _message(packed[line : line + 1], row, generation, 0, count)
        line += 1
    for part in prompts:
        for start in range(0, part.num_tokens, _MESSAGE_LINES):
            end = min(start + _MESSAGE_LINES, part.num_tokens)
            lines = packed[line + start : line + end]
            yield _message(lines, part.row, part.generation, part.first_index + start, part.count)
        line += part.num_tokens


def _message(lines: Int32Array, row: int, generation: int, prompt_index: int, count: int) -> plan_pb2.RowScores:
    most = (lines.shape[1] - 2) // 2
    columns = lines.astype("<i4", copy=False)
    scores = plan_pb2.TokenScores(
        ranks=columns[:, 0].tobytes(),
        top_token_ids=np.ascontiguousarray(columns[:, 1 : 1 + count]).tobytes(),
        logprobs=columns[:, 1 + most].tobytes(),
        top_logprobs=np.ascontiguousarray(columns[:, 2 + most : 2 + most + count]).tobytes(),
    )
    return plan_pb2.RowScores(
        row=row, generation=generation, prompt_index=prompt_index, scores=scores.SerializeToString()
    )
