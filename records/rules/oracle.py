"""Replaces the model with arithmetic: every token is a function of the whole preceding sequence.

A sequence has a *value*, which is a hash of its tokens, and the next token is a function of the value. Each token
updates the value in O(1). A wrong token, position or order changes all later tokens. The value after a position also
represents the KV at that position, which in a transformer depends on all earlier tokens.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from shared.request_spec import Pooling

VOCAB = 1000
EMPTY = 17
"""The value of the empty sequence."""


def extend(value: int, token: int, position: int) -> int:
    """Return the value of a sequence with one more token."""
    return (value * 31 + token * (position + 1) + 7) % 1_000_003


def token_after(value: int) -> int:
    """Return the token that the model generates after a sequence with this value."""
    return value % VOCAB


def value_of(tokens: Iterable[int]) -> int:
    """Return the value of a whole sequence."""
    value = EMPTY
    for position, token in enumerate(tokens):
        value = extend(value, token, position)
    return value


def embedding_of(values: list[int], pooling: Pooling) -> bytes:
    """Return the embedding of a sequence, a one-element vector; `values` contains the value after each token."""
    element = values[-1] if pooling is Pooling.LAST else sum(values) % 1_000_003
    return np.array([element], "<f4").tobytes()


def expected_embedding(prompt: list[int], pooling: Pooling) -> bytes:
    """Return the embedding that a request for this prompt must get."""
    value, values = EMPTY, []
    for position, token in enumerate(prompt):
        value = extend(value, token, position)
        values.append(value)
    return embedding_of(values, pooling)


def expected_output(prompt: list[int], max_tokens: int, stops: set[int]) -> list[int]:
    """Return the tokens that a request must generate: up to `max_tokens`, or until a stop token."""
    value = value_of(prompt)
    output: list[int] = []
    while len(output) < max_tokens and not (output and output[-1] in stops):
        output.append(token_after(value))
        value = extend(value, output[-1], len(prompt) + len(output) - 1)
    return output


SCORED = b"scored"
"""The sampling parameters of requests that ask for log-probabilities."""


def scores_of(tokens: list[int]) -> bytes:
    """Return values that represent the tokens' log-probabilities."""
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def grammar_key(grammar: bytes) -> bytes:
    """Return the key that identifies a grammar in the core."""
    return hashlib.sha256(grammar).digest() if grammar else b""
