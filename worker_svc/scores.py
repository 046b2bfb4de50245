"""Log-probabilities for the rows that ask for them: of sampled tokens, and of prompts.

They are the model's own, taken from the logits before anything changes them. A row that does not ask costs nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from protos.quire.plan.v1 import plan_pb2
from shared.columns import Int32Array

_LINES = 256
"""Lines of a vocabulary that are looked at together, which bounds the memory that takes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines of a batch's logits log-probabilities are wanted of; made once for as long as the rows stay."""

    index: torch.Tensor
    """`[R] int64`: places in the batch."""
    rows: tuple[int, ...]
    generations: tuple[int, ...]
    counts: tuple[int, ...]
    """How many of the most likely tokens each row wants."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The prompt tokens of one row that a chunk predicts."""

    row: int
    generation: int
    count: int
    """How many of the most likely tokens are wanted."""
    first_index: int
    """Index of the first of them in the prompt."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities on the device, of `[n]` tokens."""

    logprobs: torch.Tensor
    """`[n] float32`."""
    ranks: torch.Tensor
    """`[n] int32`."""
    top_ids: torch.Tensor
    """`[n, k] int32`."""
    top_logprobs: torch.Tensor
    """`[n, k] float32`."""

    def packed(self) -> torch.Tensor:
        """All of it as `[n, 2 + 2k] int32`, for one copy to the host."""
        floats = torch.cat((self.logprobs.unsqueeze(1), self.top_logprobs), dim=1).view(torch.int32)
        return torch.cat((self.ranks.unsqueeze(1), self.top_ids, floats), dim=1)


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Scores:
    """The log-probabilities of `tokens` `[n]` under `logits` `[n, vocab_size]`, and of the `count` most likely ones."""
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
    """The messages for what `Scores.packed` gave: first a line per wanted row, then those of the prompts.

    Args:
        packed: `[n, 2 + 2k] int32`.
        sampled: rows whose sampled token was scored.
        alive: (row, generation) of the rows that have not failed.
        prompts: parts of prompts.
    """
    line = 0
    for row, generation, count in (
        () if sampled is None else zip(sampled.rows, sampled.generations, sampled.counts, strict=True)
    ):
        if (row, generation) in alive:
            yield _message(packed[line : line + 1], row, generation, 0, count)
        line += 1
    for part in prompts:
        lines = packed[line : line + part.num_tokens]
        line += part.num_tokens
        yield _message(lines, part.row, part.generation, part.first_index, part.count)


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
