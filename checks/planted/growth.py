"""Memory leaks: entries that are not removed when their object has ended."""

from heapq import heapify
from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import (
    CONTINUOUS,
    both,
    with_extras,
    with_faults,
    with_limits,
    with_much_memory,
    with_overload,
    with_traffic,
)
from checks.sim.faults import Fault
from scheduler_svc.core.lifecycle.registry import RequestRegistry
from scheduler_svc.core.lifecycle.timeouts import Timeouts
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.queueing.placement import Placement
from scheduler_svc.core.requests.accounts import AccountNumbers

_MANY_REQUESTS = both(with_much_memory, with_overload, with_limits(**CONTINUOUS))


class _Hoard(dict[Any, Any]):
    """A dictionary that never deletes entries."""

    def __delitem__(self, key: Any) -> None:
        pass


@bug("size", aim=both(with_extras, _MANY_REQUESTS, with_traffic(grammars=0.9)))
def ended_kept_by_grammar(patch: pytest.MonkeyPatch) -> None:
    """An ended request stays in the list of requests with its grammar."""

    def kept(end: Any, self: RequestRegistry, request: Any, *how: Any, **more: Any) -> None:
        end(self, request, *how, **more)
        if request.grammar_key:
            self._by_grammar.setdefault(request.grammar_key, {})[request.key] = request

    wrap(patch, RequestRegistry, "end", kept)


@bug("size", aim=both(_MANY_REQUESTS, with_traffic(credit_tokens=1)))
def ended_kept_as_stalling(patch: pytest.MonkeyPatch) -> None:
    """An ended request stays in the list of requests without credit."""

    def hoarding(init: Any, self: Timeouts, *arguments: Any) -> None:
        init(self, *arguments)
        self._stalling = _Hoard()

    wrap(patch, Timeouts, "__init__", hoarding)


@bug("size", aim=both(with_limits(prefix_cache="hash", num_workers=1), with_faults(Fault.CRASH, per_step=0.2)))
def lost_worker_in_directory(patch: pytest.MonkeyPatch) -> None:
    """The prefix directory still contains a lost worker."""
    patch.setattr(PrefixCache, "leave_directory", lambda self: None)


@bug("size", aim=with_limits(**CONTINUOUS))
def loads_kept(patch: pytest.MonkeyPatch) -> None:
    """Every earlier load of a worker remains in the heap of loads."""

    def kept(listed: Any, self: Placement, worker: Any) -> None:
        entries, self._by_load = self._by_load, []
        listed(self, worker)
        self._by_load = [*entries, *self._by_load, (1 << 40, self._order[worker], worker)]
        heapify(self._by_load)

    wrap(patch, Placement, "_list", kept)


@bug("size", aim=_MANY_REQUESTS)
def account_numbers_kept(patch: pytest.MonkeyPatch) -> None:
    """Every request that is given a row gets a new account number."""

    def always_new(self: AccountNumbers, account: Any) -> int:
        self._accounts.append(account)
        self._users.append(2)
        return len(self._accounts) - 1

    patch.setattr(AccountNumbers, "enter", always_new)
