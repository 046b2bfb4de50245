"""Snapshots of queues and blocks for operators: equal to the core's own tables, and bounded."""

from collections import Counter

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.lifecycle import tables
from scheduler_svc.core.lifecycle.tables import BlockMap, Blocks
from scheduler_svc.core.memory.window_blocks import window_key
from scheduler_svc.core.queueing.sessions import ShownSession
from tests.scheduler_svc.block_states import states_of
from tests.scheduler_svc.cluster import FRONTEND, Cluster


def _cluster(num_blocks: int = 20, kind: dict[str, int] | None = None, prefix_cache: str = "hash") -> Cluster:
    cluster = Cluster(max_num_seqs=6, max_num_batched_tokens=32, prefix_cache=prefix_cache)
    cluster.join(ModelWorker(b"w/1", num_blocks, 4, 8, num_host_blocks=40, **(kind or {})))  # type: ignore[arg-type]
    return cluster


def _shown(found: BlockMap, blocks: Blocks) -> list[tuple[str, int | None]]:
    """Returns by block its state and the stream of its owner, as a viewer reads a map."""
    result: list[tuple[str, int | None]] = []
    for state in blocks.cells().tolist():
        if state < tables.HELD_STATE:
            result.append((("free", "cached", "retired")[state], None))
        else:
            owner = (state - tables.HELD_STATE) // 2
            stream = found.owners[owner].stream if owner < len(found.owners) else None
            result.append(("shared" if (state - tables.HELD_STATE) % 2 else "held", stream))
    return result


@pytest.mark.parametrize("kind", [{}, {"num_kv_groups": 3, "window": 5, "window_chunk": 4}], ids=["full", "windows"])
def test_a_block_map_is_the_pool_and_the_block_tables(kind: dict[str, int]) -> None:
    """At every step each block has the pool's state, and an owner whose tables contain it; all states occur."""
    cluster = _cluster(60 if kind else 20, kind)
    seen: Counter[str] = Counter()
    for stream in range(9):
        cluster.submit(stream, [1, 2, 3, 4, 5, 6, 7, 8, stream], 12)
    for _ in range(60):
        cluster.plan()
        (worker,) = cluster.core._fleet
        (found,) = cluster.core.tables().block_maps
        expected = states_of(worker)
        assert found.device.total == len(expected)
        rows = [row for row in worker.rows.occupied() if worker.rows.requests[row] is not None]
        assert found.tokens[: len(rows)] == [worker.rows.num_computed(row) for row in rows]
        for (state, owner), (expected_state, holders) in zip(_shown(found, found.device), expected, strict=True):
            assert state == expected_state
            assert (owner in holders) if holders else owner is None
            seen[state] += 1
        cluster.answer()
    assert set(seen) == {"free", "cached", "retired", "held", "shared"}


def test_the_host_tier_names_the_requests_whose_kv_it_keeps() -> None:
    """Each host block belongs to the swapped request that will copy it back."""
    cluster = _cluster(prefix_cache="off")
    for stream in range(8):
        cluster.submit(stream, [stream, 1, 2, 3, 4], 25)
    while not cluster.core.stats().workers[0].host_blocks_held:
        cluster.plan()
        cluster.answer()
    (found,) = cluster.core.tables().block_maps
    shown = [owner for state, owner in _shown(found, found.host) if state == "held"]
    expected = {
        request.key.stream: len(request.swapped.host_blocks)
        for request in cluster.core._requests
        if request.swapped is not None
    }
    assert expected
    assert Counter(shown) == expected


def test_a_large_pool_is_sampled() -> None:
    """Of very many blocks every n-th is shown, with the state that it has in the complete map."""
    cluster = Cluster(max_num_seqs=6, max_num_batched_tokens=32)
    cluster.join(ModelWorker(b"w/1", 500, 4, 8))
    for stream in range(6):
        cluster.submit(stream, [stream, *range(30)], 12)
    cluster.plan()
    (worker,) = cluster.core._fleet
    whole, part = (tables.block_map(worker, [], most) for most in (500, 64))
    assert (part.device.total, part.device.stride) == (500, 8)
    assert np.array_equal(part.device.cells(), whole.device.cells()[::8])


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "edf", "fair", "lpm"])
def test_ready_requests_are_shown_in_the_order_of_admission(policy: str) -> None:
    """While nothing else happens, requests are admitted in the order that the queue shows."""
    cluster = Cluster(max_num_seqs=1, max_num_batched_tokens=64, policy=policy, policy_preemption="off")
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    for stream in range(8):
        cluster.submit(
            stream,
            [stream, 1, 2],
            4 + (stream * 5) % 7,
            priority=(stream * 3) % 4,
            tenant=f"t{stream % 3}",
            total_deadline=300.0 - 20 * ((stream * 3) % 5),
        )
    cluster.plan()
    for _ in range(6):
        (queue,) = cluster.core.tables().queues
        assert (queue.reason, queue.length) == ("room", len(queue.first))
        first = queue.first[0].key.stream
        waiting = {each.key.stream for each in queue.first}
        (running,) = {request.key.stream for request in cluster.core._requests} - waiting
        cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=running))
        for _ in range(4):
            cluster.answer()
            cluster.plan()
        (after,) = cluster.core.tables().queues
        assert waiting - {each.key.stream for each in after.first} == {first}


def test_long_queues_are_cut() -> None:
    """Of many waiting requests, the snapshot has the first ones and the number of all."""
    cluster = Cluster(max_num_seqs=1, max_num_batched_tokens=64)
    for stream in range(200):
        cluster.submit(stream, [stream, 1, 2], 4)
    (queue,) = cluster.core.tables().queues
    assert queue.length == 200
    assert [each.key.stream for each in queue.first] == list(range(tables.MAX_QUEUED))


def test_sessions_are_shown_with_the_tier_of_their_sequence() -> None:
    """A pausing session is on the device until its end is evicted; active sessions come first, and 64 are shown."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w", 64, 4, 4))
    prompt = list(range(40))
    cluster.submit(1, prompt, 4, tenant="t", session=b"agent", expected_pause_s=9.0)
    cluster.run()
    ((pausing, tier),) = cluster.core.tables().sessions
    assert (pausing.tenant, pausing.name, pausing.state, pausing.turn) == ("t", "agent", "pausing", 1)
    assert (pausing.num_tokens, tier) == (44, "device")

    cluster.submit(2, list(range(500, 720)), 20)
    cluster.run()
    assert ("agent", "") in [(each.name, tier) for each, tier in cluster.core.tables().sessions]
    for stream in range(3, 3 + tables.MAX_SESSIONS_SHOWN):
        cluster.submit(stream, [stream] * 8, 4)
    shown = [each.state for each, _ in cluster.core.tables().sessions]
    assert shown == ["active"] * tables.MAX_SESSIONS_SHOWN


def test_a_session_without_its_state_is_not_on_the_device() -> None:
    """With recurrent state, the cached blocks of a session are of no use after its checkpoints were replaced."""
    cluster = Cluster(prefix_cache="hash")
    cluster.join(ModelWorker(b"w", 200, 4, 4, state_bytes=64, num_checkpoints=4))
    tiers = []
    for stream, length in ((1, 40), (2, 21), (3, 33)):
        cluster.submit(stream, list(range(100 * stream, 100 * stream + length)), 9, session=b"%d" % stream)
        cluster.run()
        tiers.append({each.name: tier for each, tier in cluster.core.tables().sessions})

    assert tiers == [
        {"1": "device"},
        {"1": "device", "2": "device"},
        {"1": "", "2": "device", "3": "device"},
    ]
    assert cluster.core.stats().workers[0].blocks_free > 100, "no block was evicted"


def _push_out(cluster: Cluster) -> str:
    """Serve a session of a model with windows, then others until its tier changes; return that tier."""
    for stream in range(1, 5):
        cluster.submit(stream, [100 * stream + number for number in range(56)], 8, session=b"%d" % stream)
        cluster.run()
        tier = _first_session(cluster)[1]
        assert stream > 1 or tier == "device"
        if tier != "device":
            return tier
    pytest.fail("the session is still on the device")


def _first_session(cluster: Cluster) -> tuple[ShownSession, str]:
    return next(each for each in cluster.core.tables().sessions if each[0].name == "1")


def test_a_session_without_its_window_is_not_on_the_device() -> None:
    """With sliding windows, cached blocks are of no use without the window blocks at the end of the sequence."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w", 90, 4, 4, num_kv_groups=3, window=9, window_chunk=8))

    assert _push_out(cluster) == ""
    session, worker = _first_session(cluster)[0], cluster.core.worker(b"w")
    assert worker is not None
    assert session.place is not None
    assert worker.pool.cache.holds[session.place[1]], "the full block was evicted too"


def test_a_session_without_its_window_is_not_in_host_memory() -> None:
    """A session is in host memory while its end and all window blocks there are; one missing block is enough."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w", 90, 4, 4, num_host_blocks=400, num_kv_groups=3, window=9, window_chunk=8))

    assert _push_out(cluster) == "host"
    worker, end = cluster.core.worker(b"w"), _first_session(cluster)[0].end
    assert worker is not None
    lost = worker.swap.keys.get(window_key(end, 1))
    assert lost is not None
    worker.swap.pool.distrust(np.array([lost]))
    assert worker.swap.keys.get(end) is not None
    assert _first_session(cluster)[1] == ""


def test_the_end_of_a_session_is_found_in_host_memory() -> None:
    """After the blocks have moved down, the tier is host memory."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w", 24, 4, 4, num_host_blocks=200))
    cluster.submit(1, list(range(40)), 8, session=b"agent")
    cluster.run()
    for stream in range(2, 6):
        cluster.submit(stream, list(range(100 * stream, 100 * stream + 60)), 8)
        cluster.run()
    found = {each.name: tier for each, tier in cluster.core.tables().sessions}

    assert found["agent"] == "host"
