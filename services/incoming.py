"""Taking the token columns of a CoreMessage apart, checked before anything is passed on."""

import itertools
from collections.abc import Iterable, Iterator

from protos.quire.link.v1 import link_pb2
from shared.columns import MalformedColumnError, from_column, from_columns

TokensOfStream = tuple[int, int, list[int]]
"""Stream, index of the first token, tokens."""


def tokens_by_stream(message: link_pb2.CoreMessage) -> Iterator[TokensOfStream]:
    """Every entry of the columns, in order. Tokens become Python integers here and only here.

    Raises:
        MalformedColumnError: the columns do not fit together; nothing was yielded then.
    """
    streams, first_indices = from_columns(message.streams, message.first_indices)
    tokens: list[int] = from_column(message.tokens).tolist()
    counts: Iterable[int] = itertools.repeat(1)
    expected = len(streams)
    if message.counts:
        _, column = from_columns(message.streams, message.counts)
        counts, expected = column.tolist(), int(column.sum())
        if len(column) and column.min() < 0:
            raise MalformedColumnError("a negative number of tokens")
    if expected != len(tokens):
        raise MalformedColumnError(f"{expected} tokens announced, {len(tokens)} there")
    end = 0
    for stream, first_index, count in zip(streams.tolist(), first_indices.tolist(), counts, strict=False):
        begin, end = end, end + count
        yield stream, first_index, tokens[begin:end]
