"""Bugs that a client sees: tokens, ends, credit, deadlines, log-probabilities, and the log for Resume."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import with_extras
from scheduler_svc.core.lifecycle.registry import RequestRegistry
from scheduler_svc.core.lifecycle.timeouts import Timeouts
from scheduler_svc.core.planning import results
from scheduler_svc.core.planning.delivery import Frontends
from scheduler_svc.core.requests.kept import KeptLogs
from scheduler_svc.core.requests.resumable import IdentifiedRequests
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers.rows import RowTable


@bug("stream.ends")
def lost_cancel(patch: pytest.MonkeyPatch) -> None:
    """A cancellation is ignored."""
    patch.setattr(Scheduler, "_request_cancelled", lambda self, event, now: None)


@bug("stream.ends")
def lost_stop_string(patch: pytest.MonkeyPatch) -> None:
    """A stop string that the front end has found is ignored."""
    patch.setattr(Scheduler, "_stop_matched", lambda self, event, now: None)


@bug("stream.order", "stream.ends")
def lost_token(patch: pytest.MonkeyPatch) -> None:
    """If a step yields several tokens, the last is not delivered."""

    def fewer(
        tell: Any, self: Frontends, frontend: bytes, streams: Any, indices: Any, tokens: Any, counts: Any
    ) -> None:
        kept = max(1, len(streams) - 1)
        counted = None if counts is None else counts[:kept]
        num_tokens = kept if counted is None else int(counted.sum())
        tell(self, frontend, streams[:kept], indices[:kept], tokens[:num_tokens], counted)

    wrap(patch, Frontends, "_tell", fewer)


@bug("stream.ends", "stream.after_end")
def stop_token_ignored(patch: pytest.MonkeyPatch) -> None:
    """Generation continues after a stop token."""
    patch.setattr(RowTable, "stopped", lambda self, rows, tokens, *gathered: np.zeros(0, np.int32))


@bug("stream.credit")
def credit_ignored(patch: pytest.MonkeyPatch) -> None:
    """Rows continue without credit."""
    wrap(patch, RowTable, "set_allowed", lambda set_allowed, self, row, allowed: set_allowed(self, row, 1 << 30))


@bug("stream.order", "plan.admission", "stream.token", "core")
def preempted_loses_token(patch: pytest.MonkeyPatch) -> None:
    """A request that leaves its worker drops its newest token."""

    def forgets(displace: Any, self: RequestRegistry, request: Any, *arguments: Any) -> None:
        if len(request.tokens) > request.spec.num_prompt_tokens:
            request.tokens.pop()
        displace(self, request, *arguments)

    wrap(patch, RequestRegistry, "displace", forgets)


@bug("stream.order", "plan.admission", "finish", "work.running", "core")
def late_token_dropped(patch: pytest.MonkeyPatch) -> None:
    """A token for a request that has left its row is dropped."""
    patch.setattr(results, "_settle_late", lambda *arguments: None)


@bug("stream.deadline")
def deadline_ignored(patch: pytest.MonkeyPatch) -> None:
    """Requests continue after their deadlines."""
    patch.setattr(Timeouts, "watch_deadline", lambda *arguments: None)


@bug("stream.ends_once", "stream.order", "stream.after_end", "core", "stream.unknown", "frontend.gone")
def frontends_confused(patch: pytest.MonkeyPatch) -> None:
    """Tokens are sent to the front end that joined first."""
    wrap(
        patch, RowTable, "occupy", lambda occupy, self, *a, frontend_index, **k: occupy(self, *a, frontend_index=0, **k)
    )


@bug("scores.wrong", "scores.missing", aim=with_extras)
def scores_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """Log-probabilities have the index of the previous token."""
    wrap(
        patch,
        results,
        "_scores",
        lambda scores, *a: [(request, index - 1, of_prompt, each) for request, index, of_prompt, each in scores(*a)],
    )


@bug("resume.duplicate", "log.begun", aim=with_extras)
def duplicate_accepted(patch: pytest.MonkeyPatch) -> None:
    """A second request with the same id runs concurrently with the first."""
    wrap(
        patch,
        IdentifiedRequests,
        "knows",
        lambda knows, self, identity: self.live(identity) is None and knows(self, identity),
    )


@bug("resume.tokens", aim=with_extras)
def log_one_short(patch: pytest.MonkeyPatch) -> None:
    """The retained log of a request lacks its newest token."""
    wrap(
        patch,
        KeptLogs,
        "put",
        lambda put, self, key, log, now: put(self, key, dataclasses.replace(log, tokens=log.tokens[:-4]), now),
    )


@bug("resume.over", aim=with_extras)
def taken_over_and_going_on(patch: pytest.MonkeyPatch) -> None:
    """A request continues although its client has resumed it on another front end."""
    wrap(patch, RequestRegistry, "resume", lambda resume, self, event, now: self.identified.answer(event))
