"""Bugs in quarantine: requests that are cleared too early, too late or never, and deaths that are miscounted."""

from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import adaptation
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers import quarantine, trials
from scheduler_svc.core.workers.quarantine import Quarantine
from scheduler_svc.core.workers.trials import Trials

_POISON = adaptation("poison")
_READERS = adaptation("poison and slow readers")
_CRASHES = adaptation("crashes")


@bug("poison", "stream.reason", aim=_POISON)
def cleared_by_its_prompt(patch: pytest.MonkeyPatch) -> None:
    """A suspect is cleared as soon as its trial has begun."""
    patch.setattr(trials, "PROBATION", 0)


@bug("poison", "work.held", "work.running", "order.prompts", "finish", aim=_READERS)
def never_cleared(patch: pytest.MonkeyPatch) -> None:
    """A suspect that has survived alone stays a suspect, and its trial continues until it ends."""
    patch.setattr(Trials, "end", lambda self: None)


@bug("stream.reason", aim=_POISON)
def rejected_after_one_death_alone(patch: pytest.MonkeyPatch) -> None:
    """A request is rejected after a single death while it runs alone."""
    patch.setattr(quarantine, "FATAL_ALONE", 1)


@bug("stream.reason", "work.held", "poison", aim=_CRASHES)
def deaths_outlive_the_trial(patch: pytest.MonkeyPatch) -> None:
    """The deaths of a request still count after it was cleared."""

    def keeps(request: Request) -> None:
        request.faults.suspect = False

    patch.setattr(trials, "clear_suspect", keeps)


@bug("poison", aim=_POISON)
def any_token_proves(patch: pytest.MonkeyPatch) -> None:
    """A request is no longer a suspect as soon as it is in a row again."""
    patch.setattr(quarantine, "PROVEN_BY", 0)


@bug("poison", aim=_POISON)
def every_death_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """The last fatal step is withdrawn even if a new process has replaced the worker."""
    patch.setattr(Quarantine, "worker_died", lambda self, worker_id: self.worker_survived(worker_id))


@bug(unseen="a suspect may also be cleared because it cannot be tried, which is not visible from outside")
def suspended_trial_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The trial of a suspect without credit is dropped, so the suspect is never cleared."""

    def forget(suspend: Any, self: Trials) -> None:
        suspend(self)
        self.suspended.clear()

    wrap(patch, Trials, "_suspend", forget)


@bug(unseen="a worker has to be cut off twice while the same suspect runs alone, and come back each time")
def alone_not_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """When a death while the request ran alone is withdrawn, the count of such deaths does not decrease."""
    wrap(patch, quarantine, "withdraw_fatal_step", lambda withdraw, request, alone: withdraw(request, alone=False))
