"""Outcomes: the times and tokens of each request of a run. All times are seconds since the start of the run.

Latency counts from the intended start, not from the time of sending. A stalled server thus delays every request that
was due during the stall, even those that the generator could only send later (no coordinated omission).
"""

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


class Ending(enum.Enum):
    """How a request ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    """Cancelled by the benchmark, because of its cancel ratio."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: when it was due, sent and answered."""

    session: int
    intended_s: float
    sent_s: float
    ended_s: float
    ending: Ending = Ending.DONE
    failure: str = ""
    """Kind of the failure: the server's reason, an HTTP status, or what the client saw."""
    message_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Arrival of each message with output tokens."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server found in its cache, if the server reports them."""
    output_tokens: int = 0
    asked_tokens: int = 0
    """Maximum number of output tokens that the request asked for."""
    turn: int = 0
    session_s: float | None = None
    """Time from the session's intended start to this end; only for the last turn of a session."""
    tenant: str = ""
    priority: int = 0
    counted: bool = True
    """Whether the request belongs to the measurement. Warm-up requests do not."""

    @property
    def late_s(self) -> float:
        """Delay of the generator: from the intended start to sending."""
        return self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None without a token."""
        return self.message_times_s[0] - self.intended_s if self.message_times_s else None

    @property
    def e2e_s(self) -> float:
        """Time from the intended start to the end."""
        return self.ended_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2 or len(self.message_times_s) < 2:
            return None
        return (self.message_times_s[-1] - self.message_times_s[0]) / (self.output_tokens - 1)

    @property
    def is_short(self) -> bool:
        """Whether a completed response has fewer tokens than the request asked for."""
        return self.ending is Ending.DONE and self.output_tokens < self.asked_tokens

    @property
    def gaps_s(self) -> Sequence[float]:
        """Times between consecutive messages with tokens."""
        gaps: list[float] = np.diff(np.frombuffer(self.message_times_s)).tolist() if self.message_times_s else []
        return gaps
