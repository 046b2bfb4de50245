"""Splits the token columns of a CoreMessage by stream, after checking them."""

import itertools
from collections.abc import Iterable, Iterator

from protos.quire.link.v1 import link_pb2
from shared.columns import MalformedColumnError, from_column, from_columns

TokensOfStream = tuple[int, int, list[int]]
"""Stream number, index of the first token, token ids."""


def tokens_by_stream(message: link_pb2.CoreMessage) -> Iterator[TokensOfStream]:
    """Yield the entries of the columns in order. Only here do tokens become Python integers.

    Raises:
        MalformedColumnError: the columns are inconsistent; raised before the first entry.
    """
    streams, first_indices = from_columns(message.streams, message.first_indices)
    tokens: list[int] = from_column(message.tokens).tolist()
    counts: Iterable[int] = itertools.repeat(1)
    expected = len(streams)
    if message.counts:
        _, column = from_columns(message.streams, message.counts)
        counts, expected = column.tolist(), int(column.sum())
        if len(column) and column.min() < 0:
            raise MalformedColumnError("counts: negative number of tokens")
    if expected != len(tokens):
        raise MalformedColumnError(f"tokens: expected {expected}, got {len(tokens)}")
    end = 0
    for stream, first_index, count in zip(streams.tolist(), first_indices.tolist(), counts, strict=False):
        begin, end = end, end + count
        yield stream, first_index, tokens[begin:end]
