"""Promises for layers with a sliding window: the memory that rows hold, and the prefixes that requests share.

The model worker (`records.rules.model_worker`) checks in every step that a row's windows hold its own tokens.
"""

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import VOCAB, expected_output
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import NO_INDICES
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.memory.window_blocks import WindowBlocks, WindowRoom, WindowSizes
from shared.prefix_keys import KEY_BYTES
from tests.scheduler_svc.cluster import Cluster
from worker_svc.memory.kv_groups import WINDOW_CHUNK, KVGroups, divide

SIZES = WindowSizes(block_size=4, window=9, num_tables=2, max_step=8)


def _cluster(
    num_blocks: int = 200,
    max_rows: int = 4,
    window: int = 9,
    chunk: int = 8,
    num_host_blocks: int = 100,
    **limits: object,
) -> Cluster:
    """Return a cluster whose only worker has two groups with a window, blocks of 4 tokens, and host blocks."""
    cluster = Cluster(**({"max_num_seqs": max_rows, "max_num_batched_tokens": 32} | limits))
    cluster.join(
        ModelWorker(
            b"w/1", num_blocks, 4, max_rows, max_tokens_per_step=32, num_host_blocks=num_host_blocks,
            max_draft_tokens=4, num_kv_groups=3, window=window, window_chunk=chunk,
        )
    )  # fmt: skip
    return cluster


def _check_tokens(cluster: Cluster) -> None:
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())


def _cached(cluster: Cluster, stream: int, prompt: list[int], max_tokens: int = 10) -> int:
    """Run one request; return its cached tokens."""
    before = len(cluster.plans)
    cluster.submit(stream, prompt, max_tokens)
    cluster.run()
    admissions = [each for plan in cluster.plans[before:] for each in plan.admissions if each.stream == stream]
    return admissions[0].num_computed_tokens


EQUAL = (1, 1)
MODELS = pytest.mark.parametrize(
    ("what", "windows", "sizes", "bound"),
    [
        ("Gemma-3 1B", ([512] * 5 + [None]) * 4 + [512] * 2, EQUAL, 1.1),
        ("Gemma-3 4B", ([1024] * 5 + [None]) * 5 + [1024] * 4, EQUAL, 1.1),
        ("Gemma-3 12B", ([1024] * 5 + [None]) * 8, EQUAL, 1.1),
        ("Gemma-3 27B", ([1024] * 5 + [None]) * 10 + [1024] * 2, EQUAL, 1.1),
        # Only the layers with KV of their own: the first 15 of 35, and the first 24 of 42.
        ("Gemma 4 E2B", ([512] * 4 + [None]) * 3, (512, 256), 1.1),
        ("Gemma 4 E4B", ([512] * 5 + [None]) * 4, (2 * 512, 2 * 256), 1.1),
        ("Gemma 4 26B-A4B", ([1024] * 5 + [None]) * 5, (2 * 512, 8 * 256), 1.1),
        ("Gemma 4 31B", ([1024] * 5 + [None]) * 10, (4 * 512, 16 * 256), 1.1),
        ("gpt-oss-20b", [128, None] * 12, EQUAL, 1.1),
        ("gpt-oss-120b", [128, None] * 18, EQUAL, 1.1),
        ("a Ministral", [None, 4096, 4096, 4096] * 9, EQUAL, 1.1),
        # The first layer has a window too, but keeps the KV of all tokens.
        ("Mistral 7B v0.1", [4096] * 32, EQUAL, 1.32),
        ("StarCoder2 15B", [4096] * 40, EQUAL, 1.28),
    ],
)
"""Models with the windows of their layers. Sizes are the elements per key of layers without and with a window."""


def _groups(windows: list[int | None], sizes: tuple[int, int], max_model_len: int) -> tuple[KVGroups, list[int], int]:
    """Return a model's KV groups, the KV bytes per token of each layer, and those of a block's places together."""
    of_layers = [2 * sizes[window is not None] for window in windows]
    groups = divide(
        *([(each // 2, each // 2) for each in of_layers], windows),
        max_model_len=max_model_len, chunk=WINDOW_CHUNK, block_size=16,
    )  # fmt: skip
    assert not isinstance(groups, str)
    return groups, of_layers, groups.num_places * of_layers[groups.groups.index(0)]


@MODELS
def test_a_long_row_holds_little_more_than_its_windows_need(
    what: str, windows: list[int | None], sizes: tuple[int, int], bound: float
) -> None:
    """In decode at 32,768 tokens, a row holds at most `bound` times the KV that its layers need, in whole blocks."""
    block_size, num_prompt, num_outputs = 16, 31_000, 1_768
    groups, of_layers, of_block = _groups(windows, sizes, max_model_len=65_536)
    model = ModelWorker(
        b"w/1", 30_000, block_size, 4, max_tokens_per_step=8_192, max_model_len=65_536,
        num_kv_groups=groups.num_groups, window=groups.window, window_chunk=WINDOW_CHUNK,
    )  # fmt: skip
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=8_192, max_queued_tokens=1 << 20)
    cluster.join(model)
    cluster.submit(1, [7 * position % VOCAB for position in range(num_prompt)], 4_000)
    core, num_computed, num_tokens = cluster.core, 0, num_prompt
    while num_tokens < num_prompt + num_outputs:
        plan, _ = core.plan(model.peer, cluster.now)
        assert plan is not None
        num_computed += plan.num_tokens
        rows = [0] if num_computed >= num_prompt else []
        num_tokens += len(rows)
        core.handle(_done(plan, rows), cluster.now)
    (worker,) = core.stats().workers

    held = worker.blocks_held * of_block * block_size
    needed = sum(size * (window or num_tokens) for size, window in zip(of_layers, windows, strict=True))
    assert needed < held <= bound * needed, f"{what}: {held / needed:.3f}"


@MODELS
def test_as_many_short_requests_run_as_without_groups(
    what: str, windows: list[int | None], sizes: tuple[int, int], bound: float
) -> None:
    """Requests that may become long, but are short, need the memory of unused places in blocks at most."""
    groups, of_layers, of_block = _groups(windows, sizes, max_model_len=32_768)
    num_whole = 70
    num_blocks = num_whole * sum(of_layers) // of_block

    most = _most_rows(num_blocks, groups)
    expected = _most_rows(num_whole, None)
    assert 8 < expected < 64
    of_position = groups.num_groups * of_block
    assert most >= expected * sum(of_layers) // of_position, f"{what}: {most} instead of {expected}"


def _most_rows(num_blocks: int, groups: KVGroups | None) -> int:
    """Return how many of 64 requests with a short prompt and a long `max_tokens` run at once, in the first steps."""
    model = ModelWorker(
        b"w/1", num_blocks, 16, 64, max_tokens_per_step=512, max_model_len=32_768,
        num_kv_groups=1 if groups is None else groups.num_groups,
        window=0 if groups is None else groups.window,
        window_chunk=0 if groups is None else WINDOW_CHUNK,
    )  # fmt: skip
    cluster = Cluster(max_num_seqs=64, max_num_batched_tokens=512)
    cluster.join(model)
    for stream in range(64):
        cluster.submit(stream, [(stream + 7 * position) % VOCAB for position in range(60)], 4_000)
    most = 0
    for _ in range(30):
        cluster.plan()
        cluster.answer()
        most = max(most, len(model.rows))
    return most


def test_a_row_takes_window_blocks_with_its_tokens() -> None:
    """A row holds one block of each group per position, until its window and one step have blocks."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w/1", 200, 4, 4, num_kv_groups=3, window=33, window_chunk=8))
    cluster.submit(1, [1, 2, 3], 150)
    held, in_windows = [], []
    while cluster.readers[1].end is None:
        cluster.plan()
        cluster.answer()
        (worker,) = cluster.core.stats().workers
        held.append(worker.blocks_held)
        in_windows.append(worker.window_blocks)

    period = WindowBlocks(1, WindowSizes(block_size=4, window=33, num_tables=2, max_step=8)).period
    assert held[:30] == [-(-(4 + step) // 4) * 3 for step in range(30)]
    assert max(held) == 152 // 4 + 2 * period
    assert max(in_windows) == 2 * period
    assert not in_windows[-1]
    _check_tokens(cluster)


def _done(plan: Plan, rows: list[int]) -> ev.StepDone:
    tokens = np.full(len(rows), 5, np.int32)
    return ev.StepDone(
        worker=plan.worker, epoch=plan.epoch, step=plan.step, rows=np.array(rows, np.int32), tokens=tokens
    )


def test_long_prompts_and_outputs_use_the_same_blocks_again() -> None:
    """Sequences much longer than the window have the right tokens, with two plans in flight and drafts."""
    cluster = _cluster(max_plans_in_flight=2)
    for stream in range(5):
        cluster.submit(stream, [stream, *range(60)], 80)
    cluster.run()

    _check_tokens(cluster)
    assert max(int(plan.chunk_lengths.max(initial=0)) for plan in cluster.plans) == 8


@pytest.mark.parametrize("num_host_blocks", [0, 100])
@pytest.mark.parametrize("capacity", ["max_utilization", "guaranteed_no_evict"])
def test_little_memory(capacity: str, num_host_blocks: int) -> None:
    """When memory runs out, requests are preempted. With host memory, they are swapped out with their windows."""
    cluster = _cluster(num_blocks=75, capacity=capacity, num_host_blocks=num_host_blocks)
    for stream in range(6):
        cluster.submit(stream, [stream, 2, 3], 70)
    cluster.run()

    _check_tokens(cluster)
    (worker,) = cluster.core.stats().workers
    is_preempting = capacity == "max_utilization"
    assert (worker.counters.preemptions > 0) == is_preempting
    assert (
        (worker.counters.swapped > 0)
        == (worker.counters.restored_tokens > 0)
        == (is_preempting and num_host_blocks > 0)
    )


def test_a_swapped_request_takes_only_its_window_to_the_host() -> None:
    """A long request that is swapped needs as many host blocks as it has full blocks and visible window blocks."""
    cluster = _cluster(policy="priority", preempt_threshold=0.0, max_rows=1)
    cluster.submit(1, list(range(100, 161)), 40)
    for _ in range(20):
        cluster.plan()
        cluster.answer()
    cluster.submit(2, [1, 2, 3], 5, priority=9)
    cluster.run()

    _check_tokens(cluster)
    (out,) = [copy for plan in cluster.plans for copy in plan.swap_outs]
    (back,) = [plan for plan in cluster.plans if plan.swap_ins]
    (admission,) = back.admissions
    num_computed = admission.num_computed_tokens
    num_visible = -(-num_computed // 4) - (num_computed - 9 + 1) // 4
    assert len(out.sources) == -(-num_computed // 4) + 2 * num_visible
    assert 1 <= len(admission.token_ids) - num_computed <= 5, "only the newest token and accepted drafts are computed"
    assert admission.windows is not None
    assert admission.windows.first == (num_computed - 9 + 1) // 4


def test_the_next_turn_continues_where_the_conversation_ended() -> None:
    """A request that continues a sequence shares all of its full blocks, although the windows have moved on."""
    cluster = _cluster(prefix_cache="hash")
    prompt = list(range(100, 141))
    assert _cached(cluster, 1, prompt, 30) == 0
    turn = [*prompt, *cluster.readers[1].tokens, 1, 2, 3]
    # The last sampled token has no KV.
    assert _cached(cluster, 2, turn) == (len(prompt) + 29) // 4 * 4
    assert _cached(cluster, 3, prompt) == 40, "the end of the prompt is a boundary"
    assert _cached(cluster, 4, prompt) == 40
    _check_tokens(cluster)


def test_a_fork_is_shared_from_the_third_request_on() -> None:
    """The first request that leaves a cached prefix at a new place computes it again and caches its window there."""
    cluster = _cluster(prefix_cache="hash")
    common = list(range(100, 140))
    assert _cached(cluster, 1, [*common, *range(40)]) == 0
    assert _cached(cluster, 2, [*common, *range(50, 90)]) == 0
    assert _cached(cluster, 3, [*common, *range(90, 99)]) == 40
    _check_tokens(cluster)


def test_equal_prompts_at_once_are_computed_once() -> None:
    """Requests with the same prompt wait for its end, and share it."""
    cluster = _cluster(prefix_cache="hash")
    for stream in range(3):
        cluster.submit(stream, list(range(100, 141)), 10)
    cluster.run()

    _check_tokens(cluster)
    (worker,) = cluster.core.stats().workers
    assert worker.counters.cached_tokens == 2 * 40


def test_a_tail_that_a_row_has_read_stays_suspect_after_the_row_has_passed_it() -> None:
    """If a long prompt fails at its end, the tail that it continued from is dropped, too."""
    windows, blocks = WindowBlocks(200, SIZES), np.arange(10)
    num_new = windows.num_taken(0, 12, (10,))
    room = WindowRoom(NO_INDICES.reshape(0, 2), num_new, num_new, (10,))
    windows.open(0, room, np.arange(100, 100 + num_new), num_shared=0, num_blocks=12)
    windows.attach(0, blocks)
    tail, num_new = windows.tail_of(blocks), windows.num_taken(10, 30)
    room = WindowRoom(tail, num_new, num_new, ())
    windows.open(1, room, np.arange(150, 150 + num_new), num_shared=10, num_blocks=30)
    assert windows.passed(1, 56).tolist() == tail.ravel().tolist()

    assert np.isin(tail, windows.suspects(1)).all()


def test_a_window_that_steps_in_flight_may_overwrite_is_not_swapped() -> None:
    """With so many drafts in flight that a row may use a visible block again, its request is computed again."""
    windows = WindowBlocks(200, SIZES)
    num_new = windows.num_taken(0, 30)
    windows.open(
        0, WindowRoom(NO_INDICES.reshape(0, 2), num_new, num_new, ()), np.arange(num_new), num_shared=0, num_blocks=30
    )
    first = windows.first_visible(60)

    blocks = windows.present(0, 60, first + windows.period - 1)
    assert blocks is not None
    assert blocks.shape == (60 // 4 - first, 2)
    assert windows.present(0, 60, first + windows.period) is None


def test_a_tail_in_front_of_a_swapped_window_is_not_attached() -> None:
    """A row whose window was copied back attaches no tail that begins before this window."""
    windows, blocks = WindowBlocks(200, SIZES), np.arange(100, 120)
    first = windows.first_visible(75)
    num_new = windows.num_taken(first, 20)
    room = WindowRoom(NO_INDICES.reshape(0, 2), num_new, num_new, (), first)
    windows.open(0, room, np.arange(num_new), num_shared=first, num_blocks=20)

    assert not len(windows.attach(0, blocks[: first + windows.tail - 1], last_written=first + windows.tail - 1))
    attached = windows.attach(0, blocks[: first + windows.tail], last_written=first + windows.tail)
    assert len(attached) == 2 * windows.tail


def test_window_blocks_do_not_count_as_full_blocks() -> None:
    """A block that was evicted, and then attached as a window block, moves to the host only as a window block."""
    windows = WindowBlocks(200, SIZES)
    cache, keys = PrefixCache(200, windows=windows), bytes(KEY_BYTES * 10)
    cache.publish(keys[:KEY_BYTES], np.array([50]))
    cache.forget(np.array([50]))
    num_new = windows.num_taken(0, 12, (10,))
    taken = np.arange(50, 50 + num_new)
    windows.open(0, WindowRoom(NO_INDICES.reshape(0, 2), num_new, num_new, (10,)), taken, num_shared=0, num_blocks=12)
    chain = np.arange(10)
    cache.publish(b"".join(bytes([number]) * KEY_BYTES for number in range(10)), chain)
    cache.attach(0, chain)

    attached = taken[windows.is_attached(taken)]
    assert len(attached)
    assert cache.holds[attached].all()
    assert all(len(each.entry.key) > KEY_BYTES for each in cache.entries(attached))
    assert all(len(each.entry.key) == KEY_BYTES for each in cache.entries(chain))
    assert len(cache.entries(attached)) == len(attached)


def test_a_worker_without_room_for_its_windows_is_refused() -> None:
    """A pool that does not hold one block of each group serves nothing."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w/1", 2, 4, 4, num_kv_groups=3, window=9, window_chunk=8))

    assert not cluster.core.stats().workers


@pytest.mark.parametrize("num_blocks", [3, 5, 12, 20, 33, 100])
def test_the_longest_sequence_fits(num_blocks: int) -> None:
    """A sequence of the maximum length gets its blocks alone, whatever it shares, and a longer one would not."""
    windows = WindowBlocks(num_blocks, SIZES)

    def most(length: int) -> int:
        shared = range(length)
        return length + max(windows.num_taken(each, length) + 2 * min(each, windows.tail) for each in shared)

    longest = SIZES.max_positions(num_blocks)
    assert most(longest) <= num_blocks < most(longest + 1)


@pytest.mark.parametrize("num_blocks", [80, 82])
def test_an_urgent_request_preempts_for_the_window_that_it_shares(num_blocks: int) -> None:
    """The shared tail of an urgent request cannot be taken for its other blocks, so enough rows are preempted."""
    cluster = Cluster(
        max_num_seqs=8, max_num_batched_tokens=32, prefix_cache="hash", policy="priority", preempt_threshold=1.0
    )
    cluster.join(
        ModelWorker(
            b"w/1", num_blocks, 4, 8, max_tokens_per_step=32, num_kv_groups=3, window=33, window_chunk=8,
        )
    )  # fmt: skip
    prompt = list(range(100, 141))
    cluster.submit(1, prompt, 1)
    cluster.run()
    for stream in (2, 3):
        cluster.submit(stream, [stream, 1, 2], 40)
    for _ in range(10):
        cluster.plan()
        cluster.answer()
    before = len(cluster.plans)
    cluster.submit(4, prompt, 5, priority=9)
    for _ in range(2):
        cluster.plan()
        cluster.answer()

    admissions = [each for plan in cluster.plans[before:] for each in plan.admissions if each.stream == 4]
    assert [each.num_computed_tokens for each in admissions] == [40]
    cluster.run()
    _check_tokens(cluster)
