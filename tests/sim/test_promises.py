"""Promises of the simulator in the smallest histories in which they were wrong."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from checks.sim.coverage import Coverage
from checks.sim.promises.base import Watched
from checks.sim.promises.eligible import Eligibility, Memory, Obstacle
from checks.sim.promises.evictions import LeastRecentlyUsedGoFirst
from checks.sim.promises.order import AdmissionOrder
from checks.sim.scenario import WindowShape
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface.config import CoreConfig
from shared.request_spec import Pooling


class _Key(SimpleNamespace):
    """A stream or an epoch, which is a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def _watched(**config: Any) -> Any:
    scenario = SimpleNamespace(shares_prefixes=True, state_bytes=0, windows=WindowShape(), config=CoreConfig(**config))
    scenario.traffic = SimpleNamespace(retained=0.0, shared_salt=True)
    world = SimpleNamespace(scenario=scenario, coverage=Coverage(), now=0.0)
    one = {"w": object()}
    cluster = SimpleNamespace(epochs=one, sites=one, longest=lambda: 100)
    return SimpleNamespace(
        world=world, cluster=cluster, clients=None, book=SimpleNamespace(sequence={}), stats=None, tables=None
    )


# ---------------------------------------------------------------- evict.order


def _plan(step: int, admitted: dict[int, tuple[list[int], int]], leaves: list[int]) -> Any:
    """Return a plan that admits rows with their blocks, the first of which are cached."""
    admissions = [
        SimpleNamespace(row=row, frontend=b"f", stream=row, blocks=np.array(blocks), num_computed_tokens=num_found)
        for row, (blocks, num_found) in admitted.items()
    ]
    none = np.array([], np.int32)
    return SimpleNamespace(
        step=step, leaves=np.array(leaves, np.int32), admissions=admissions, append_rows=none, append_blocks=none
    )


def _evictions(*plans: Any) -> None:
    model = SimpleNamespace(num_host_blocks=0, block_size=1)
    epoch = cast(Any, _Key(failed=set(), model=model, is_lost=False))
    promise = LeastRecentlyUsedGoFirst(cast(Watched, _watched(prefix_cache="hash")))
    for plan in plans:
        promise.plan_made(plan, epoch)


def test_a_block_is_evicted_with_an_older_one_before_it() -> None:
    """A row with its own copies of a prefix leaves later than the prefix.

    A block behind the prefix is evicted with it.
    """
    _evictions(
        _plan(1, {0: ([0, 1], 0), 1: ([2, 3, 4], 0)}, []),
        _plan(2, {2: ([0, 1, 4, 5], 3)}, [0]),
        _plan(3, {}, [2]),
        _plan(6, {}, [1]),
        # Block 1, unused since step 3, is evicted. Without block 1, block 4, unused since step 6, cannot be found.
        _plan(7, {3: ([4], 0)}, []),
        _plan(8, {4: ([0, 6], 1)}, []),
    )


def test_a_block_that_was_used_later_is_not_evicted_first() -> None:
    """The promise fails if a block is evicted while a block that was unused for longer stays in the cache."""
    with pytest.raises(ViolationError, match="unused since step 3, is found"):
        _evictions(
            _plan(1, {0: ([0, 1], 0), 1: ([4, 5], 0)}, []),
            _plan(2, {2: ([0, 1, 6], 2), 3: ([4, 5, 7], 2)}, [0, 1]),
            _plan(3, {}, [2]),
            _plan(6, {}, [3]),
            _plan(7, {4: ([5], 0)}, []),
            _plan(8, {5: ([0, 8], 1)}, []),
        )


# ---------------------------------------------------------------- order.overtaken


class _LacksMemory(Eligibility):
    """The waiting request always lacks memory."""

    def memory(self, *_: Any, **__: Any) -> Memory:
        return Memory(0, 0, 0, 0)

    def obstacle(self, *_: Any, **__: Any) -> Obstacle | None:
        return Obstacle.MEMORY


def _stream(number: int, prompt: list[int]) -> Any:
    demand = SimpleNamespace(prompt=prompt, tenant="", scored=False, pooling=Pooling.NONE, priority=0)
    return _Key(
        name=StreamName(b"f", number),
        demand=demand,
        arrival=float(number),
        num_known=len(prompt),
        starved=False,
        first_tokens=lambda count: prompt[:count],
    )


def _overtaken(waiting: list[int], computed_by_plan: list[int]) -> float:
    """Return how often one admission overtook a request, in a plan that completes another row's prompt."""
    watched = _watched(policy="fcfs")
    quotas = SimpleNamespace(may_be_last=lambda stream: False, has_any=lambda stream: False)
    promise = AdmissionOrder(watched, _LacksMemory(watched, cast(Any, quotas), cast(Any, None)))
    other, admitted = _stream(1, waiting), _stream(2, [8, 9])
    for number, stream in enumerate((other, admitted)):
        watched.book.sequence[stream] = number
        promise._wait(stream)
    size = len(computed_by_plan)
    rows = {
        0: SimpleNamespace(name=StreamName(b"f", 0), tokens=computed_by_plan, computed=size, num_admitted=size),
        1: SimpleNamespace(name=admitted.name, tokens=[8, 9], computed=2, num_admitted=2),
    }
    epoch = SimpleNamespace(model=SimpleNamespace(rows=rows, block_size=2), jobs={})
    plan = SimpleNamespace(chunk_rows=np.array([0, 1]), admissions=[SimpleNamespace(row=1)])
    promise.admitted(admitted, cast(Any, None), cast(Any, plan), cast(Any, epoch))
    return promise._overtaken.get(other, 0.0)


def test_a_request_whose_prefix_the_plan_completes_is_not_overtaken() -> None:
    """While another row computes its prefix, a request is held, even if it lacks memory too and the plan completes it.

    A prefix that only the admitted request computes is no excuse.
    """
    assert _overtaken([1, 2, 3], [1, 2, 4]) == 0.0
    assert _overtaken([1, 2, 3], [5, 6, 7]) == 1.0
    assert _overtaken([8, 9, 3], [5, 6, 7]) == 1.0
