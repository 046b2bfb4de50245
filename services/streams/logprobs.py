"""Converts log-probabilities from the worker's columns to the public message."""

from typing import NamedTuple

import numpy as np

from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.text.tokenizer import TextTokenizer
from shared.columns import from_column


class Scored(NamedTuple):
    """Log-probability and rank of one token, and the most likely tokens with theirs."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


def read_scores(serialized: bytes) -> list[Scored]:
    """Parse a serialized quire.plan.v1.TokenScores, token by token.

    Raises:
        ValueError: it does not parse, or its columns are inconsistent.
    """
    message = plan_pb2.TokenScores.FromString(serialized)
    logprobs = from_column(message.logprobs).view(np.float32).tolist()
    ranks = from_column(message.ranks).tolist()
    num_tokens = len(logprobs)
    top_ids = from_column(message.top_token_ids).reshape(num_tokens, -1).tolist()
    top_logprobs = from_column(message.top_logprobs).view(np.float32).reshape(num_tokens, -1).tolist()
    return [
        Scored(logprob, rank, list(zip(ids, values, strict=True)))
        for logprob, rank, ids, values in zip(logprobs, ranks, top_ids, top_logprobs, strict=True)
    ]


def token_logprobs(token_id: int, scored: Scored | None, tokenizer: TextTokenizer) -> v1.TokenLogprobs:
    """Return the public form; `scored` is None for a token without log-probability."""
    message = v1.TokenLogprobs()
    message.token.token_id = token_id
    message.token.bytes = tokenizer.token_bytes(token_id)
    if scored is None:
        return message
    message.token.logprob, message.token.rank = min(scored.logprob, 0.0), scored.rank
    for rank, (top_id, logprob) in enumerate(scored.top, 1):
        message.top.add(token_id=top_id, logprob=min(logprob, 0.0), rank=rank, bytes=tokenizer.token_bytes(top_id))
    return message
