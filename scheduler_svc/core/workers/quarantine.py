"""Quarantine: finds a request that kills workers by running suspects alone, and ends only that request, with POISON.

A request that crashes a kernel would crash one worker after the other, because a lost worker's requests continue on
other workers. A step during which its worker dies is *fatal* for every request in it. A request in two fatal steps
becomes a *suspect* and gets a trial: it runs in steps without other requests. If the worker survives its prompt and one
decode, the suspect is cleared.

In a fleet that loses workers every minute, a single death during a trial may be a coincidence, but two consecutive
deaths count as proof. A request is therefore rejected after `FATAL_STEPS` fatal steps with others and `FATAL_ALONE`
alone.

A worker that reconnects because it lost the scheduler did not die. The fatal step is then withdrawn from its requests.
Until the worker reconnects, a death and a network partition look the same.

Workers also die for other reasons. If a request has `PROVEN_BY` new tokens since its last fatal step, it has survived
the computation that preceded the loss. Its count then restarts at 0, so that a series of unrelated losses creates few
suspects.
"""

from scheduler_svc.core.requests.request import Request, RequestState

FATAL_STEPS = 2
"""Number of fatal steps that make a suspect."""
FATAL_ALONE = 2
"""Number of consecutive deaths with the request alone, after which it is rejected."""
PROVEN_BY = 4
"""Number of tokens after a fatal step that show that the request did not cause it."""
PROBATION = 2
"""Tokens to generate alone. The first is sampled after prefill, the second by a decode."""
WITHDRAWABLE_S = 60.0
"""Seconds after the loss of a worker during which its fatal step can be withdrawn."""
REJECTED = (
    "request rejected: workers died each time they computed it, the last two times with no other request in the step;"
    " do not send it again"
)


def record_fatal_step(request: Request, *, alone: bool) -> bool:
    """Record a fatal step for a request that has left its row.

    Returns:
        True if the request must be rejected.
    """
    faults = request.faults
    if request.num_generated - faults.fatal_at >= PROVEN_BY:
        faults.fatal_steps = faults.fatal_alone = 0
    faults.fatal_steps += 1
    faults.fatal_alone += alone
    faults.fatal_at = request.num_generated
    faults.suspect = faults.fatal_steps >= FATAL_STEPS
    return faults.fatal_alone >= FATAL_ALONE and faults.fatal_steps >= FATAL_STEPS + FATAL_ALONE


def withdraw_fatal_step(request: Request, *, alone: bool) -> None:
    """Remove the request's last fatal step from its count, because the worker did not die."""
    faults = request.faults
    faults.fatal_steps = max(0, faults.fatal_steps - 1)
    faults.fatal_alone = max(0, faults.fatal_alone - alone)
    faults.suspect = faults.fatal_steps >= FATAL_STEPS


def clear_suspect(request: Request) -> None:
    """Clear a request that has survived alone."""
    request.faults.suspect = False
    request.faults.fatal_steps = request.faults.fatal_alone = 0


class Quarantine:
    """Fatal steps of lost workers. If a worker reconnects, its fatal step is withdrawn from the requests."""

    def __init__(self) -> None:
        """Start without lost workers."""
        self._lost: dict[str, tuple[float, bool, list[Request]]] = {}
        """By worker id, oldest first: time of the loss, whether the step contained one suspect alone, and its
        requests.
        """

    def worker_lost(self, worker_id: str, requests: list[Request], *, alone: bool, now: float) -> list[Request]:
        """Record a fatal step for all requests in flight; return those to reject."""
        self._lost.pop(worker_id, None)
        if requests:
            self._lost[worker_id] = now, alone, requests
        return [request for request in requests if record_fatal_step(request, alone=alone)]

    def worker_died(self, worker_id: str) -> None:
        """Make a worker's last fatal step permanent, because a new process has replaced it."""
        self._lost.pop(worker_id, None)

    def worker_survived(self, worker_id: str) -> list[Request]:
        """Withdraw a reconnected worker's last fatal step; return its live requests."""
        _, alone, requests = self._lost.pop(worker_id, (0.0, False, []))
        live = [request for request in requests if request.state is not RequestState.FINISHED]
        for request in live:
            withdraw_fatal_step(request, alone=alone)
        return live

    def time_passed(self, now: float) -> None:
        """Make fatal steps permanent that are too old to be withdrawn."""
        while self._lost and now - next(iter(self._lost.values()))[0] > WITHDRAWABLE_S:
            del self._lost[next(iter(self._lost))]
