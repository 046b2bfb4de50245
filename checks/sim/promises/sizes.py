"""The core's memory grows only with the number of requests, rows, workers and front ends."""

import enum
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator

from checks.sim.promises.base import Promise, Watched
from records.rules.violation import ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.requests.request import Request, RequestState
from scheduler_svc.core.workers.worker import Worker

_PACKAGE = "scheduler_svc.core."
_VALUES = frozenset(_PACKAGE + name for name in ("config", "effects", "events", "plan", "records"))
"""Modules of value types, which contain no containers that grow."""

_PER_LIVE = 4
"""Entries per container for each live request, row, worker and front end."""
_ALWAYS = 32
"""Constant number of further entries per container."""
_LAZY = 96
"""The same for containers that are cleaned only when many of their entries are stale."""
_TABLE = 128
"""Entries in a container that has one for each tenant and size."""
_IS_LAZY = frozenset(
    {
        "FairQueue._order",
        "FairQueue._queues",
        "KeyedQueue._heap",
        "Placement._by_load",
        "PlanSchedule._heap",
        "ShortestFirst._heap",
        "ShortestFirst._places",
        "Timeouts._deadlines",
        "_GrammarTurns._keys[]",
        "_LeastServed._heap",
        "_LeastServed._listed",
        "finished requests",
        "workers",
    }
)
_IS_TABLE = frozenset({"Grammars._failed", "Grammars._unused", "_Ratios.distances", "_Ratios.values"})
_HAS_OWN_LIMIT = frozenset(
    {
        "Forecast._admissions",
        "History._ended",
        "KeptLogs._logs",
        "OutputLengths._samples",
        "OutputLengths._sorted",
        "Sessions._free",
        "Sessions._kinds",
        "Sessions._lengths",
        "Sessions._named",
        "Sessions._pausing",
        "Sessions._pausing_of",
        "Sessions._sessions",
        "Sessions._stems",
        "Sessions._tails",
    }
)
"""Containers with limits that a simulation does not reach. Their contents are not examined."""
_BY_BLOCK = (
    "BlockPool.", "DiskSpace.", "HostKeys.", "HostPool.", "PartialBlocks.", "PrefixCache.", "PrefixDirectory.",
    "RecencyQueue.", "Retention.", "_Group.", "_Node.",
)  # fmt: skip
"""Containers with at most a few entries for each block of a worker."""
_BY_STATE = ("StateCheckpoints.", "HostStates.")
"""Containers with at most a few entries for each recurrent state that a worker can save."""

_CONTAINERS = (dict, list, set, frozenset, deque, tuple, array)
_PLAIN = (str, bytes, int, float, type(None), enum.Enum)


class MemoryIsBounded(Promise):
    """Every container of the core has at most a few entries for each live request, row, worker and front end.

    Caches have a few for each block. Containers that are cleaned lazily may have twice as many, and a constant.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._core = watched.core
        self._num_events = 0

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        self._num_events += 1
        # Some containers are cleaned up only after some time.
        if isinstance(event, ev.TimePassed) and self._num_events >= self.world.scenario.check_every:
            self._num_events = 0
            self._check()

    def at_rest(self) -> None:
        self._check()

    def _check(self) -> None:
        epochs = {epoch.number for epoch in self.cluster.epochs.values()}
        models = [epoch.model for epoch in self.cluster.epochs.values()]
        live = len(self.clients.live) + len(models) + self.world.scenario.num_frontends
        live += sum(model.max_rows for model in models)
        blocks = sum(model.num_blocks + model.num_host_blocks + model.num_disk_blocks for model in models)
        for path, size in sizes_of(self._core, epochs).items():
            if path in _HAS_OWN_LIMIT:
                continue
            most = _PER_LIVE * live + (_LAZY if path in _IS_LAZY else _TABLE if path in _IS_TABLE else _ALWAYS)
            if path.startswith(_BY_BLOCK):
                most += _PER_LIVE * blocks
            if path.startswith(_BY_STATE):
                most += _PER_LIVE * sum(model.num_checkpoints + model.num_host_states for model in models)
            if size > most:
                raise ViolationError("size", f"{path} has {size} entries beside {live} things that are live")


def sizes_of(core: object, epochs: Collection[int]) -> Counter[str]:
    """Return the number of entries in each container reachable from a core object, by path.

    Args:
        core: the first object.
        epochs: those of connected workers; other workers are counted but not examined.
    """
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    to_visit: list[tuple[object, str]] = [(core, "")]
    while to_visit:
        value, path = to_visit.pop()
        if id(value) in seen:
            continue
        if isinstance(value, _CONTAINERS):
            if not isinstance(value, tuple):
                seen.add(id(value))
                sizes[path] += len(value)
            if not isinstance(value, array) and path not in _HAS_OWN_LIMIT:
                members = [*value, *value.values()] if isinstance(value, dict) else value
                to_visit += [
                    (each, path + "[]" if isinstance(each, _CONTAINERS) and not isinstance(each, tuple) else path)
                    for each in members
                    if not isinstance(each, _PLAIN)
                ]
        elif type(value).__module__.startswith(_PACKAGE) and not _is_value(value):
            seen.add(id(value))
            if isinstance(value, Request):
                sizes["finished requests"] += value.state is RequestState.FINISHED
                continue
            if isinstance(value, Worker):
                sizes["workers"] += 1
                if value.epoch not in epochs:
                    continue
            owner = type(value).__name__
            to_visit += [(each, f"{owner}.{name}") for name, each in _attributes(value) if not isinstance(each, _PLAIN)]
    return sizes


def _is_value(value: object) -> bool:
    return type(value).__module__ in _VALUES


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
