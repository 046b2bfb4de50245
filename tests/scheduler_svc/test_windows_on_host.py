"""Promises for cached prefixes of models with sliding windows in host memory: they return with the window they need."""

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import NO_INDICES
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.memory.host_keys import BlockEntry, HostKeys
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.memory.window_blocks import WindowBlocks, WindowRoom, WindowSizes, window_key
from scheduler_svc.core.planning import host_copies
from scheduler_svc.core.workers.cost_model import CostModel
from shared.prefix_keys import KEY_BYTES, BlockKey
from tests.scheduler_svc.cluster import FRONTEND, Cluster

SIZES = WindowSizes(block_size=4, window=9, num_tables=2, max_step=8)
NUM_PROMPT = 80
TAIL = 2 * SIZES.tail
"""Window blocks in a tail."""


def _cluster(*, num_host_blocks: int = 800, copy_s: float = 1e-9, copies_overlap: bool = False) -> Cluster:
    """Return a cluster whose device holds few prefixes of 80 tokens: 20 full blocks and 4 window blocks or more."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=16)
    cluster.join(
        ModelWorker(
            b"w/1", 90, 4, 4, num_host_blocks=num_host_blocks, copy_s=copy_s, copies_overlap=copies_overlap,
            num_kv_groups=3, window=SIZES.window, window_chunk=SIZES.max_step,
        )
    )  # fmt: skip
    return cluster


def _prompt(session: int) -> list[int]:
    return [100 + 10 * session + number % 7 for number in range(NUM_PROMPT)]


def _keys(number: int) -> bytes:
    """Return the joined keys of so many blocks."""
    return b"".join(bytes([place]) * KEY_BYTES for place in range(number))


class _CountingKeys(HostKeys):
    """An empty table that counts lookups."""

    num_lookups = 0

    def get(self, key: BlockKey) -> int | None:
        self.num_lookups += 1
        return super().get(key)


def _serve(cluster: Cluster, stream: int, prompt: list[int], max_tokens: int = 5) -> int:
    """Serve a request alone; return how many of its tokens were cached."""
    reader = cluster.submit(stream, prompt, max_tokens)
    cluster.run()
    assert reader.tokens == expected_output(prompt, max_tokens, set())
    assert reader.end is not None
    return reader.end.cached_prompt_tokens


def _fill(cluster: Cluster, first_stream: int = 10) -> None:
    """Serve other sessions, until the blocks of earlier ones have left the device."""
    for number in range(8):
        _serve(cluster, first_stream + number, _prompt(first_stream + number))


def _fill_slowly(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like `_fill`; afterwards, a plan copies at most 8 blocks, because no copy was measured."""
    with monkeypatch.context() as patch:
        patch.setattr(host_copies, "_UNKNOWN", 100)
        _fill(cluster)


def _copied_back(plans: list[Plan]) -> list[int]:
    """Return the number of blocks of each copy to the device."""
    return [len(copy.targets) for plan in plans for copy in plan.swap_ins]


@pytest.mark.parametrize(("num_host_blocks", "expected"), [(800, NUM_PROMPT), (0, 0)])
def test_a_prefix_that_left_the_device_is_not_computed_again(num_host_blocks: int, expected: int) -> None:
    """The next turn continues after the whole conversation, although other sessions needed the device's memory."""
    cluster = _cluster(num_host_blocks=num_host_blocks)
    _serve(cluster, 1, _prompt(1))
    _fill(cluster)
    num_plans = len(cluster.plans)

    assert _serve(cluster, 2, [*_prompt(1), 7, 8]) == expected
    (worker,) = cluster.core.stats().workers
    assert worker.counters.restored_tokens == expected
    assert worker.host_blocks_held == 0
    assert sum(_copied_back(cluster.plans[num_plans:])) == (NUM_PROMPT // 4 + TAIL if expected else 0)
    assert any(line.endswith("tokens copied from host memory") for line in cluster.story(2)) == bool(expected)


def test_a_turn_without_the_response_continues_after_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a chat template omits a response, such as its reasoning, the window before the prompt's end has moved too."""
    cluster = _cluster(copy_s=0.0)
    _serve(cluster, 1, _prompt(1), max_tokens=30)
    _fill_slowly(cluster, monkeypatch)

    assert _serve(cluster, 2, [*_prompt(1), 7, 8]) == (NUM_PROMPT - 1) // 4 * 4
    assert cluster.core.stats().workers[0].counters.restored_tokens > 0


def test_a_long_prefix_is_copied_by_several_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a copy was measured, a plan copies eight blocks. The request starts with the last of the tail."""
    cluster = _cluster(copy_s=0.0)
    _serve(cluster, 1, _prompt(1))
    _fill_slowly(cluster, monkeypatch)
    num_plans = len(cluster.plans)
    assert _serve(cluster, 2, [*_prompt(1), 7, 8]) == NUM_PROMPT

    plans = [plan for plan in cluster.plans[num_plans:] if plan.swap_ins]
    assert [sum(_copied_back([plan])) for plan in plans] == [8, 8, 8]
    assert [len(plan.admissions) for plan in plans] == [0, 0, 1]
    (admission,) = plans[-1].admissions
    assert admission.windows is not None
    assert admission.windows.tables[:, : SIZES.tail].T.ravel().tolist() == plans[-1].swap_ins[-1].targets.tolist()


def test_no_step_waits_for_copies_that_overlap() -> None:
    """If copies overlap with steps, a request starts with the plan after the last copies of its tail."""
    cluster = _cluster(copies_overlap=True)
    _serve(cluster, 1, _prompt(1))
    _fill(cluster)
    num_plans = len(cluster.plans)
    assert _serve(cluster, 2, [*_prompt(1), 7, 8]) == NUM_PROMPT

    plans = cluster.plans[num_plans:]
    copying = [number for number, plan in enumerate(plans) if plan.swap_ins]
    (admitting,) = [number for number, plan in enumerate(plans) if plan.admissions]
    assert copying
    assert admitting == copying[-1] + 1


def test_a_tail_alone_comes_back() -> None:
    """If the device still has the full blocks of a prefix, only its tail is copied."""
    cluster = _cluster()
    _serve(cluster, 1, _prompt(1))
    stream = 10
    while not any(plan.swap_outs for plan in cluster.plans):
        _serve(cluster, stream, _prompt(stream))
        stream += 1
    num_plans = len(cluster.plans)
    assert _serve(cluster, 2, [*_prompt(1), 7, 8]) == NUM_PROMPT

    copied = sum(_copied_back(cluster.plans[num_plans:]))
    assert 0 < copied < NUM_PROMPT // 4


def test_slow_copies_are_not_made() -> None:
    """When copying is slower than computing, the prefix is computed again."""
    cluster = _cluster(copy_s=1.0)
    for round_number in range(4):
        _fill(cluster, 10 * (round_number + 1))

    assert cluster.core.stats().workers[0].swapped_in_blocks == 0


def test_a_prefix_that_is_not_copied_because_computing_is_faster_is_not_called_unusable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its window is in host memory, so neither the story nor the metric says that a window was missing."""
    cluster = _cluster()
    _serve(cluster, 1, _prompt(1))
    _fill(cluster)
    monkeypatch.setattr(CostModel, "restores", lambda *_: False)

    assert _serve(cluster, 2, [*_prompt(1), 7, 8]) == 0
    assert not any("not usable" in line for line in cluster.story(2))
    assert cluster.core.stats().workers[0].counters.unusable_tokens == 0


def test_only_the_last_two_tails_of_a_run_move() -> None:
    """Earlier tails are of use only to requests that leave the conversation there, so they are not copied."""
    windows = WindowBlocks(300, SIZES)
    cache = PrefixCache(300, windows=windows)
    keys = _keys(20)
    num_new = windows.num_taken(0, 20, (5, 10, 20))
    room = WindowRoom(NO_INDICES.reshape(0, 2), num_new, num_new, (5, 10, 20))
    windows.open(0, room, np.arange(100, 100 + num_new), num_shared=0, num_blocks=20)
    chain = np.arange(20)
    cache.publish(keys, chain)
    for num_blocks in (5, 10, 20):
        cache.attach(0, chain[:num_blocks])

    attached = windows.attached_to(chain)
    assert len(attached) == 3 * TAIL
    expected = {
        int(windows.tail_of(chain[:end])[place, table]): window_key(
            bytes([end - SIZES.tail + place]) * KEY_BYTES, table
        )
        for end in (10, 20)
        for place in range(SIZES.tail)
        for table in range(2)
    }
    assert {each.block: each.entry.key for each in cache.entries(attached)} == expected
    assert not any(each.entry.is_first for each in cache.entries(attached))

    cache.publish(keys[: 10 * KEY_BYTES] + b"fork".ljust(KEY_BYTES), np.append(chain[:10], 90))
    assert len(cache.entries(attached)) == 3 * TAIL, "a fork makes the earlier tail useful"


def test_a_lost_window_block_costs_only_the_tokens_after_the_tail_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """If host memory loses a window block of the response's tail, the next turn continues after the prompt."""
    cluster = _cluster(copy_s=0.0)
    _serve(cluster, 1, _prompt(1), max_tokens=30)
    _fill_slowly(cluster, monkeypatch)
    sequence = [*_prompt(1), *cluster.readers[1].tokens]
    worker, request = cluster.core.worker(b"w/1"), cluster.submit(2, sequence, 1)
    assert worker is not None
    (waiting,) = cluster.core._requests
    end = worker.prefixes.match(waiting).num_blocks
    assert end > NUM_PROMPT // 4
    lost = worker.swap.keys.get(window_key(worker.prefixes.last_key(waiting, end), 0))
    assert lost is not None
    worker.swap.pool.distrust(np.array([lost]))
    cluster.run()

    assert request.end is not None
    assert request.end.cached_prompt_tokens == (NUM_PROMPT - 1) // 4 * 4


def test_a_prefix_reaches_as_far_as_both_tiers_have_a_whole_tail() -> None:
    """A tail may be partly on the device and partly in host memory. One missing block makes it useless."""
    windows, host = WindowBlocks(300, SIZES), HostKeys(50)
    keys = _keys(20)
    blocks = np.arange(12)

    def store(position: int, table: int) -> None:
        key = window_key(bytes([position]) * KEY_BYTES, table)
        host.add([BlockEntry(key, b"", False)], np.array([len(host)]))

    windows.restore(np.array([10, 10, 11]), np.array([0, 1, 0]), np.array([100, 101, 102]))
    assert windows.reach(blocks) == windows.reach_with_host(blocks, keys, 20, host) == 0
    store(11, 1)
    assert windows.reach_with_host(blocks, keys, 20, host) == 12
    assert windows.missing(blocks, 12).tolist() == [[11, 1]]
    for position, table in ((17, 0), (17, 1), (18, 0)):
        store(position, table)
    assert windows.reach_with_host(blocks, keys, 20, host) == 12
    store(18, 1)
    assert windows.reach_with_host(blocks, keys, 20, host) == 19
    assert windows.missing(blocks, 19).tolist() == [[17, 0], [17, 1], [18, 0], [18, 1]]
    assert windows.reach_with_host(blocks, keys, 18, host) == 12


def test_the_longest_reach_of_any_tiers() -> None:
    """The reach is the longest prefix whose last `tail` positions, or all of them, are complete."""
    rng = np.random.default_rng(1)
    for window in (2, 5, 9, 21):
        sizes = WindowSizes(block_size=4, window=window, num_tables=2, max_step=8)
        for _ in range(100):
            num_known, num_blocks = int(rng.integers(0, 16)), int(rng.integers(0, 16))
            windows, host, keys = WindowBlocks(100, sizes), HostKeys(100), _keys(num_known)
            has = rng.random((2, num_known, 2)) < rng.uniform(0.3, 1.0)
            has[0, num_blocks:] = False
            full, tables = np.nonzero(has[0])
            windows.restore(full, tables, 50 + np.arange(len(full)))
            for number, (position, table) in enumerate(zip(*np.nonzero(has[1]), strict=True)):
                entry = BlockEntry(window_key(keys[KEY_BYTES * position :][:KEY_BYTES], table), b"", False)
                host.add([entry], np.array([number]))
            found = has[0] | has[1]
            ends = [end for end in range(num_known + 1) if found[max(0, end - sizes.tail) : end].all()]

            blocks = np.arange(min(num_blocks, num_known))
            assert windows.reach_with_host(blocks, keys, num_known, host) == ends[-1]


def test_few_lookups_find_that_no_tail_is_complete() -> None:
    """At most one position per tail is looked up if host memory has no window block of a long prefix."""
    windows, host, num_known = WindowBlocks(300, SIZES), _CountingKeys(50), 200

    assert windows.reach_with_host(np.arange(100), _keys(num_known), num_known, host) == 0
    assert host.num_lookups <= num_known // SIZES.tail


def test_a_failed_row_empties_the_host() -> None:
    """After a row with logits that are not finite, no window block in host memory is used any more."""
    cluster = _cluster()
    _serve(cluster, 1, _prompt(1))
    _fill(cluster)
    assert cluster.core.stats().workers[0].host_blocks_cached > 0
    cluster.submit(2, _prompt(2), 8)
    cluster.plan()
    cluster.spoil(2)
    cluster.run()

    assert cluster.core.stats().workers[0].host_blocks_cached == 0
    assert _serve(cluster, 3, [*_prompt(1), 7, 8]) == 0


def test_a_lost_worker_loses_its_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker computes the prefix again, with the same tokens, although copies were in flight."""
    cluster = _cluster(copy_s=0.0)
    _serve(cluster, 1, _prompt(1))
    _fill_slowly(cluster, monkeypatch)
    second = cluster.submit(2, [*_prompt(1), 7, 8], 5)
    assert cluster.plan()
    assert cluster.plans[-1].swap_ins
    cluster.lose(b"w/1")
    cluster.join(ModelWorker(b"w/2", 90, 4, 4, num_host_blocks=800, num_kv_groups=3, window=9, window_chunk=8))
    cluster.run()

    assert second.tokens == expected_output([*_prompt(1), 7, 8], 5, set())
    assert second.end is not None
    assert second.end.cached_prompt_tokens == 0


def test_a_cancelled_request_leaves_its_copied_blocks_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that were copied back for a request remain shareable if it ends before its tail is complete."""
    cluster = _cluster(copy_s=0.0)
    _serve(cluster, 1, _prompt(1))
    _fill_slowly(cluster, monkeypatch)
    second = cluster.submit(2, [*_prompt(1), 7, 8], 5)
    cluster.plan()
    cluster.answer()
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=2))
    cluster.run()
    assert not second.tokens

    assert _serve(cluster, 3, [*_prompt(1), 7, 8]) == NUM_PROMPT
    assert cluster.core.stats().workers[0].swapped_in_blocks == NUM_PROMPT // 4 + TAIL, "blocks were copied twice"
