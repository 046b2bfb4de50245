"""Jobs: the requests of a workload, as values. A job knows its tokens, so that every scheduler sees the same prefixes.

A prompt consists of pieces. Equal pieces stand for equal tokens, so two prompts share a prefix exactly as far as their
pieces agree. The tokens that a job generates are a piece as well: a later prompt of the same session contains it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
_TOKENS = 1 << 30
"""Number of different tokens."""


class Piece(NamedTuple):
    """A run of tokens."""

    name: int
    length: int

    def tokens(self) -> Tokens:
        """Return the tokens, `[length]`; equal names give equal tokens."""
        return ((first_token(self.name) + np.arange(self.length, dtype=np.int64)) % _TOKENS).astype(np.int32)


def first_token(name: int) -> int:
    """Return the first token of a piece, a hash of its name; the others follow by counting on."""
    return int.from_bytes(hashlib.blake2b(name.to_bytes(8, "little"), digest_size=8).digest(), "little") % _TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request; times in seconds."""

    at: float
    """When it is sent, since the beginning of the run."""
    prompt: tuple[Piece, ...]
    outputs: Piece
    """The tokens that it generates: exactly as many, whatever they are."""
    group: str = ""
    """Name under which its latencies are reported apart; empty: none."""
    tenant: str = ""
    priority: int = 0
    """Higher is more urgent."""
    session: int = -1
    """Number of the conversation that it belongs to; -1: none."""
    turn: int = 0
    """Number among the requests of its session."""
    ttft_target_s: float | None = None
    """Its own target for the first token; None: the run's."""
    tpot_target_s: float | None = None
    """Its own target for the mean time per token after the first; None: the run's."""
    tells_targets: bool = False
    """Whether the scheduler learns the targets with the request."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return sum(piece.length for piece in self.prompt)

    @property
    def num_outputs(self) -> int:
        """Tokens to generate."""
        return self.outputs.length

    def prompt_tokens(self) -> Tokens:
        return np.concatenate([piece.tokens() for piece in self.prompt])


class SeenPrefixes:
    """Every prefix that earlier jobs had: a prefix cache without a limit, the bound of every real one."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, Piece], int] = {}

    def add(self, pieces: Sequence[Piece]) -> int:
        """Add a sequence; return how many of its leading tokens an earlier one had, in whole pieces."""
        node = seen = 0
        is_known = True
        for piece in pieces:
            following = self._next.get((node, piece))
            if following is None:
                is_known = False
                following = self._next[node, piece] = len(self._next) + 1
            elif is_known:
                seen += piece.length
            node = following
        return seen
