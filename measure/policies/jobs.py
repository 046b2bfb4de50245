"""Jobs: the requests of a workload, as values.

A job's tokens are fixed, so that every scheduler sees the same prefixes.

A prompt consists of pieces. Equal pieces have equal tokens, so two prompts share exactly their common leading pieces.
The generated tokens are also a piece, which later prompts in the same session contain.
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
        """Return the tokens `[length]`. Equal names give equal tokens."""
        return ((first_token(self.name) + np.arange(self.length, dtype=np.int64)) % _TOKENS).astype(np.int32)


def first_token(name: int) -> int:
    """Return a piece's first token, a hash of its name. The following tokens count up from it."""
    return int.from_bytes(hashlib.blake2b(name.to_bytes(8, "little"), digest_size=8).digest(), "little") % _TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request; times in seconds."""

    at: float
    """Submission time since the beginning of the run."""
    prompt: tuple[Piece, ...]
    outputs: Piece
    """Piece with the tokens to generate; only their number matters."""
    group: str = ""
    """Group for which latencies are reported separately; empty for none."""
    tenant: str = ""
    priority: int = 0
    """Higher is more urgent."""
    session: int = -1
    """Number of the conversation; -1 for none."""
    turn: int = 0
    """Index among the requests in its session."""
    ttft_target_s: float | None = None
    """The job's TTFT target; None to use the run's."""
    tpot_target_s: float | None = None
    """The job's TPOT target (mean time per token after the first); None to use the run's."""
    tells_targets: bool = False
    """Whether the request passes the targets to the scheduler."""

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
    """Every prefix that earlier jobs contained: an unlimited prefix cache, which bounds every real one."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, Piece], int] = {}

    def add(self, pieces: Sequence[Piece]) -> int:
        """Add a sequence; return how many of its leading tokens an earlier sequence contained, in whole pieces."""
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
