"""Tenure: the time in which a scheduler may lead by its lease. Pure: times in, decisions out.

All times are of the scheduler's own monotonic clock. The store counts the duration of the lease from when it handles a
request, which is after the request was sent. The scheduler counts from before it sent the request, and only a part of
the duration, so it stops first even if the clocks run at different speeds.
"""

from dataclasses import dataclass

from scheduler_svc.standby.leader_number import Numbers

MARGIN = 0.1
"""Share of the duration by which the holder stops leading earlier, for clocks that run at different speeds."""


@dataclass(slots=True)
class Tenure:
    """Tenure of one scheduler.

    Args:
        duration_s: time after its last renewal at which the lease ends, seconds.
    """

    duration_s: float
    number: int = 0
    """Number under which this scheduler leads; 0 while it does not hold the lease."""
    held_until: float = 0.0
    """Time after which this scheduler must not send anything more."""

    def acquired(self, number: int, requested_at: float) -> None:
        """Begin to lead under a number."""
        self.renewed(requested_at)
        self.number = number

    def renewed(self, requested_at: float) -> None:
        """Continue to lead after a renewal that was requested at this time."""
        self.held_until = requested_at + self.duration_s * (1 - MARGIN)

    def lost(self) -> None:
        """Stop leading, because the lease has ended."""
        self.held_until = 0.0

    def may_send(self, now: float) -> bool:
        """Return whether the scheduler leads, so that it may send something at this time."""
        return bool(self.number) and now <= self.held_until


def next_number(stored: int, highest: int, now_ms: int) -> int:
    """Return the number of a new leader.

    Args:
        stored: number of the last leader in the store; 0 for none.
        highest: highest number that the new leader knows; 0 for none.
        now_ms: time since 1970, ms, which is the number of the first leader.
    """
    return max(stored, highest) + 1 if stored or highest else now_ms


def may_stand(numbers: Numbers, copied: int, *, silence_s: float, grace_s: float) -> bool:
    """Return whether a scheduler tries to acquire the lease.

    A scheduler that may have missed a part of the last leader's journal lets others acquire it first.

    Args:
        numbers: the leader numbers that it knows.
        copied: number of the leader whose whole journal it has; 0 for none.
        silence_s: time since it last received something from a leader, seconds.
        grace_s: silence after which it stands in any case, seconds.
    """
    return max(numbers.own, copied) == numbers.highest or silence_s > grace_s
