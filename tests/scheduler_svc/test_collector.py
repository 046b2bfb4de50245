"""Why the scheduler may keep Python's collector from looking: what is over is freed without it."""

import gc
from collections.abc import Iterator

import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from tests.scheduler_svc.cluster import FRONTEND, Cluster


@pytest.fixture
def kept_garbage() -> Iterator[list[object]]:
    """What a collection finds from now on, instead of freeing it."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_nothing_of_the_core_waits_for_the_collector(kept_garbage: list[object], prefix_cache: str) -> None:
    """Ended requests and lost workers are in no circle of references, so that they need no garbage collection.

    The requests finish, are cancelled, refused, swapped out or left by their worker.
    """
    cluster = Cluster(policy="priority", prefix_cache=prefix_cache, max_num_seqs=4, max_num_batched_tokens=32)
    for incarnation in range(3):
        peer = b"w/%d" % incarnation
        cluster.join(ModelWorker(peer, 12, 4, 4, num_host_blocks=8))
        for index in range(10):
            stream = 100 * incarnation + index
            cluster.submit(stream, [*range(index + 1)], 20, priority=index % 3, identity=b"%d" % stream)
        for _ in range(12):
            cluster.plan()
            cluster.answer()
        cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=100 * incarnation + 9))
        cluster.submit(100 * incarnation + 50, [-1], 1)
        cluster.lose(peer)
    cluster.effects.clear()
    cluster.plans.clear()

    gc.collect()

    assert [each for each in kept_garbage if type(each).__module__.startswith("scheduler_svc.core")] == []
