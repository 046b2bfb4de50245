"""What swapping promises: paused requests come back without being computed again, within bounded host memory."""

import numpy as np

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.memory.swapping import SwapSpace
from tests.scheduler_svc.cluster import FRONTEND, Cluster


def _cluster(*, num_blocks: int = 20, num_host_blocks: int = 40, **limits: object) -> Cluster:
    cluster = Cluster(**({"max_num_seqs": 6, "max_num_batched_tokens": 32, "prefix_cache": "off"} | limits))
    cluster.join(ModelWorker(b"w/1", num_blocks, 4, 8, num_host_blocks=num_host_blocks))
    return cluster


def _check_all(cluster: Cluster) -> None:
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())
    (worker,) = cluster.core.stats().workers
    assert worker.host_blocks_held == 0
    assert worker.blocks_free + worker.blocks_cached == worker.blocks_total


def test_swapped_requests_are_not_computed_again() -> None:
    """Under memory pressure every token is computed once: prompts, and one step for each further token."""
    cluster = _cluster()
    for stream in range(8):
        cluster.submit(stream, [stream, 1, 2, 3, 4], 20)
    cluster.run()
    _check_all(cluster)
    (worker,) = cluster.core.stats().workers
    assert worker.swapped_out_blocks == worker.swapped_in_blocks > 0
    assert worker.counters.preemptions > 0
    assert worker.counters.scheduled_tokens == 8 * (5 + 19)


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    """What does not fit into host memory is computed again."""
    cluster = _cluster(num_host_blocks=3)
    for stream in range(8):
        cluster.submit(stream, [stream, 1, 2, 3, 4], 20)
    cluster.run()
    _check_all(cluster)
    (worker,) = cluster.core.stats().workers
    assert worker.counters.scheduled_tokens > 8 * (5 + 19)


def test_an_urgent_request_swaps_out_its_victim() -> None:
    """Pausing for a higher priority keeps the victim's KV, and the victim finishes with the same tokens."""
    cluster = _cluster(num_blocks=40, policy="priority", max_num_seqs=2)
    for stream in range(2):
        cluster.submit(stream, [stream, 1, 2], 30)
    for _ in range(8):
        cluster.plan()
        cluster.answer()
    cluster.submit(9, [9, 9], 4, priority=9)
    cluster.run()
    _check_all(cluster)
    assert cluster.core.stats().workers[0].swapped_out_blocks > 0


def test_host_memory_of_requests_that_end_or_move_comes_back() -> None:
    """Cancelling a swapped request, or losing its worker, leaves no host block behind."""
    cluster = _cluster()
    for stream in range(8):
        cluster.submit(stream, [stream, 1, 2, 3, 4], 25)
    while not cluster.core.stats().workers[0].host_blocks_held:
        cluster.plan()
        cluster.answer()
    for stream in range(8):
        cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=stream))
    cluster.run()
    assert cluster.core.stats().workers[0].host_blocks_held == 0

    for stream in range(10, 18):
        cluster.submit(stream, [stream, 1, 2, 3, 4], 25)
    while not cluster.core.stats().workers[0].host_blocks_held:
        cluster.plan()
        cluster.answer()
    cluster.lose(b"w/1")
    cluster.join(ModelWorker(b"w/2", 60, 4, 8, num_host_blocks=5))
    cluster.run()
    for stream in range(10, 18):
        assert cluster.readers[stream].tokens == expected_output([stream, 1, 2, 3, 4], 25, set())


def test_swapping_needs_blocks_and_room() -> None:
    """Neither without a computed block nor without host blocks for all of them."""
    space = SwapSpace(4)
    assert space.has_room(4)
    assert not space.has_room(5)
    assert not space.has_room(0)
    space.out(np.arange(3))
    assert space.has_room(1)
    assert not space.has_room(2)
