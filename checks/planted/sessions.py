"""Bugs of the gate for new sessions."""

import math
from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import adaptation, both, with_traffic
from scheduler_svc.core.interface.arrays import NO_INDICES
from scheduler_svc.core.memory.retention import Retention
from scheduler_svc.core.queueing.session_gate import SessionGate
from scheduler_svc.core.queueing.sessions import Sessions
from scheduler_svc.core.requests.request import Request

_SESSIONS = adaptation("sessions")


@bug("session.bound", aim=_SESSIONS)
def session_waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    """The wait of a new session for memory has no bound."""

    def without_bound(init: Any, self: SessionGate, sessions: Any, policy: Any, longest_wait_s: float) -> None:
        init(self, sessions, policy, math.inf)

    wrap(patch, SessionGate, "__init__", without_bound)


@bug("session.bound", "finish", aim=_SESSIONS)
def gate_never_opens(patch: pytest.MonkeyPatch) -> None:
    """No request that waits at the gate passes."""
    patch.setattr(SessionGate, "open", lambda self, workers, now: iter(()))


@bug("session.under_way", aim=_SESSIONS)
def later_turns_held(patch: pytest.MonkeyPatch) -> None:
    """The gate takes a later turn of a session for the first of a new one."""

    def any_turn(begins: Any, self: Sessions, request: Request) -> bool:
        session = self._sessions[request.session] if request.session >= 0 else None
        if session is None:
            return False
        turn, session.turn = session.turn, 1
        try:
            found: bool = begins(self, request)
        finally:
            session.turn = turn
        return found

    wrap(patch, Sessions, "begins", any_turn)


@bug("session.needless", aim=both(_SESSIONS, with_traffic(conversations=0.0, families=0, alphabet=900)))
def single_turns_held(patch: pytest.MonkeyPatch) -> None:
    """Every request counts as the first turn of several, although none returns."""
    patch.setattr(Sessions, "begins", lambda self, request: request.session >= 0)


@bug("core", aim=_SESSIONS)
def tail_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The former tail of a session stays in the table."""

    def stays(clear: Any, self: Sessions, session: Any) -> None:
        session.tail = b""

    wrap(patch, Sessions, "_clear_tail", stays)


@bug("retain.end", aim=adaptation("retained sessions"))
def ended_session_retained(patch: pytest.MonkeyPatch) -> None:
    """The end of a session does not end the retention by its earlier turns."""
    patch.setattr(Retention, "end_sessions", lambda self, sessions: NO_INDICES)
