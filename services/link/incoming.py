"""Splits the token columns of a CoreMessage by stream, after checking them."""

from collections.abc import Iterator

from protos.quire.link.v1 import link_pb2
from shared.columns import MalformedColumnError, from_column, from_columns

TokensOfStream = tuple[int, int, list[int]]
"""Stream number, index of the first token, token ids."""


def tokens_by_stream(message: link_pb2.CoreMessage) -> Iterator[TokensOfStream]:
    """Return the entries of the columns in order. Only here do tokens become Python integers.

    Raises:
        MalformedColumnError: the columns are inconsistent.
    """
    streams, first_indices = from_columns(message.streams, message.first_indices)
    tokens: list[int] = from_column(message.tokens).tolist()
    counts = None
    expected = len(streams)
    if message.counts:
        _, counts = from_columns(message.streams, message.counts)
        expected = int(counts.sum())
        if len(counts) and counts.min() < 0:
            raise MalformedColumnError("counts: negative number of tokens")
    if expected != len(tokens):
        raise MalformedColumnError(f"tokens: expected {expected}, got {len(tokens)}")
    if counts is None:
        parts = [[token] for token in tokens]
    else:
        ends = counts.cumsum().tolist()
        parts = [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return zip(streams.tolist(), first_indices.tolist(), parts, strict=True)
