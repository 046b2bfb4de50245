"""What happens to a failed row, to the rows that share its KV, and to the blocks that it wrote and read."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker, Row
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.planning.row_failures import MAX_LOST_PREFIXES
from scheduler_svc.core.workers.worker import Worker
from tests.scheduler_svc.cluster import FRONTEND, Cluster, Reader

PEER = b"w/1"
BLOCK = 4
PREFIX = list(range(100, 140))
"""Ten blocks."""


def _cluster(*, rows: int = 8, budget: int = 64, num_blocks: int = 400, **limits: Any) -> Cluster:
    settings = {"max_num_seqs": rows, "max_num_batched_tokens": budget, "max_queued_requests": 4096}
    cluster = Cluster(**(settings | limits))
    cluster.join(ModelWorker(PEER, num_blocks, BLOCK, rows, max_tokens_per_step=budget))
    return cluster


def _step(cluster: Cluster) -> None:
    cluster.plan()
    cluster.answer()


def _worker(cluster: Cluster) -> ModelWorker:
    return cluster.workers[PEER]


def _row(cluster: Cluster, stream: int) -> Row:
    """The row that a stream has on the model worker."""
    return next(row for row in _worker(cluster).rows.values() if row.name.stream == stream)


def _runs(cluster: Cluster, stream: int) -> bool:
    return any(row.name.stream == stream for row in _worker(cluster).rows.values())


def _fail(cluster: Cluster, stream: int, kind: ev.FailureKind, *, reason: str = "why", field: str = "") -> None:
    """The answers under way report that the stream's row has failed."""
    row = _row(cluster, stream)
    failure = ev.FailedRow(row=row.index, generation=row.generation, kind=kind, reason=reason, field=field)
    answers = cluster.answers[PEER]
    for _ in range(len(answers)):
        answer = answers.popleft()
        keep = answer.rows != row.index
        rows, tokens = answer.rows[keep], answer.tokens[keep]
        failures = (*answer.failures, failure)
        answers.append(dataclasses.replace(answer, rows=rows, tokens=tokens, failures=failures))


def _end(reader: Reader) -> ef.RequestEnded:
    assert reader.end is not None
    return reader.end


def _check_served(reader: Reader, *, preemptions: int) -> None:
    """The client has all tokens, and the request was paused so often."""
    assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())
    assert _end(reader).preemptions == preemptions


@dataclasses.dataclass
class Work:
    """Operations of the core, counted by name."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def count(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        """Counts the calls of a method."""
        method = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            self.counts[name] += 1
            return method(*arguments, **named)

        patch.setattr(owner, name, counted)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Count the possible costs of a failure: requests that leave rows, and look-ups of invalid blocks."""
    found = Work()
    for owner, name in ((Worker, "vacate"), (BlockPool, "distrust"), (PrefixCache, "forget")):
        found.count(monkeypatch, owner, name)
    return found


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ev.FailureKind.NO_TOKEN_ALLOWED, ef.EndReason.INVALID),
        (ev.FailureKind.GRAMMAR_TOO_COSTLY, ef.EndReason.INVALID),
        (ev.FailureKind.INTERNAL, ef.EndReason.ROW_FAILED),
    ],
)
def test_a_failure_without_nan_ends_only_its_request(
    kind: ev.FailureKind, reason: ef.EndReason, rows: int, work: Work
) -> None:
    """A failure without NaN ends its request with the reason for its kind, the worker's message and the field.

    No request that shares its prefix is preempted. The cost does not depend on their number.
    """
    cluster = _cluster(rows=rows, budget=8 * rows, num_blocks=40 * rows)
    for stream in range(rows):
        cluster.submit(stream, [*PREFIX, stream], 30)
    while not all(reader.tokens for reader in cluster.readers.values()):
        _step(cluster)
    cluster.plan()
    _fail(cluster, 0, kind, reason="leaves no token", field="grammar")
    work.counts.clear()

    cluster.answer()

    assert work.counts["vacate"] == 1
    assert work.counts["forget"] <= 1, "the request's own last block"
    end = _end(cluster.readers[0])
    assert (end.reason, end.message, end.field) == (reason, "leaves no token", "grammar")
    cluster.run()
    for stream in range(1, rows):
        _check_served(cluster.readers[stream], preemptions=0)
    later = cluster.submit(rows, [*PREFIX, 7], 3)
    cluster.run()
    assert _end(later).cached_prompt_tokens == len(PREFIX), "what the failed row wrote is as good as before"


@pytest.mark.parametrize("num_sharers", [5, 40])
def test_rows_that_share_what_a_failed_row_wrote_are_planned_again_in_one_pass(num_sharers: int, work: Work) -> None:
    """Each request leaves its row once, and the invalid blocks leave the cache at once, however many share them."""
    rows = num_sharers + 1
    cluster = _cluster(rows=rows, budget=8 * rows, num_blocks=100 * rows, long_prefill_token_threshold=8)
    cluster.submit(0, [*PREFIX, *range(40)], 5)
    _step(cluster)
    cluster.spoil(0)
    for stream in range(1, rows):
        cluster.submit(stream, [*PREFIX, *range(stream, stream + 60)], 5)
    writer = cluster.readers[0]
    while writer.end is None:
        work.counts.clear()
        _step(cluster)

    assert work.counts == {"vacate": rows, "distrust": 1, "forget": 1}
    assert _end(writer).reason is ef.EndReason.ROW_FAILED
    cluster.run()
    for stream in range(1, rows):
        _check_served(cluster.readers[stream], preemptions=1)


def test_a_neighbour_that_got_a_token_in_the_same_step_goes_on() -> None:
    """A request that got a token in the same step keeps its row, and later requests find the shared blocks.

    Its token was computed from these blocks, so their KV is valid.
    """
    cluster = _cluster()
    writer = cluster.submit(0, [*PREFIX, 1], 30)
    while not writer.tokens:
        _step(cluster)
    neighbour = cluster.submit(1, [*PREFIX, 2], 30)
    while not neighbour.tokens:
        _step(cluster)
    cluster.spoil(0)
    while writer.end is None:
        _step(cluster)
    later = cluster.submit(2, [*PREFIX, 3], 4)
    cluster.run()

    assert _end(writer).reason is ef.EndReason.ROW_FAILED
    _check_served(neighbour, preemptions=0)
    _check_served(later, preemptions=0)
    assert _end(later).cached_prompt_tokens == len(PREFIX)


def test_requests_that_fail_on_a_sound_prefix_end_at_once() -> None:
    """Requests that fail on a valid prefix end at once, and the prefix stays in the cache.

    Another request decodes with the prefix. So they have failed by themselves, however many they are.
    """
    cluster = _cluster()
    neighbour = cluster.submit(0, [*PREFIX, 1], 30)
    while not neighbour.tokens:
        _step(cluster)
    poison = [cluster.submit(stream, [*PREFIX, stream], 5) for stream in (1, 2)]
    cluster.plan_for(PEER, 1)
    for stream in (1, 2):
        _fail(cluster, stream, ev.FailureKind.NOT_FINITE)
    cluster.answer()

    for reader in poison:
        assert (_end(reader).reason, _end(reader).preemptions) == (ef.EndReason.ROW_FAILED, 0)
    later = cluster.submit(3, [*PREFIX, 3], 4)
    cluster.run()
    _check_served(neighbour, preemptions=0)
    assert _end(later).cached_prompt_tokens == len(PREFIX)


def test_only_the_writer_of_a_shared_block_is_at_fault() -> None:
    """When two requests share a block and both fail, only the writer ends.

    The reader, and a third request that has not failed yet, are planned again.
    """
    cluster = _cluster(budget=64, long_prefill_token_threshold=8)
    writer = cluster.submit(0, [*PREFIX, *range(16)], 5)
    _step(cluster)
    cluster.spoil(0)
    while _row(cluster, 0).computed < len(PREFIX):
        _step(cluster)
    cluster.submit(1, [*PREFIX, *range(50, 66)], 5)
    cluster.submit(2, [*PREFIX, *range(200, 250)], 5)
    while writer.end is None:
        cluster.plan()
        failures = cluster.answers[PEER][0].failures
        cluster.answer()
    cluster.run()

    assert len(failures) == 2
    assert _end(writer).reason is ef.EndReason.ROW_FAILED
    _check_served(cluster.readers[1], preemptions=1)
    _check_served(cluster.readers[2], preemptions=1)


def test_a_writers_own_blocks_that_explain_a_failure_clear_the_prefix() -> None:
    """When the writer's own blocks explain a reader's failure, the valid prefix that both share stays in the cache."""
    cluster = _cluster(long_prefill_token_threshold=8)
    cluster.submit(0, [*PREFIX, 1], 5)
    cluster.run()
    own = list(range(200, 216))
    cluster.submit(1, [*PREFIX, *own, *range(8)], 5)
    for _ in range(2):
        cluster.plan_for(PEER, 1)
        cluster.answer()
        cluster.spoil(1)
    cluster.submit(2, [*PREFIX, *own, *range(8, 16)], 5)
    cluster.plan_for(PEER, 1)
    assert len(cluster.answers[PEER][0].failures) == 2
    cluster.answer()
    cluster.submit(3, [*PREFIX, 3], 5)
    cluster.plan_for(PEER, 1)
    found = {each.stream: each.num_computed_tokens for each in cluster.plans[-1].admissions}
    cluster.run()

    assert found == {1: 0, 2: len(PREFIX), 3: len(PREFIX)}
    for stream in (1, 2, 3):
        _check_served(cluster.readers[stream], preemptions=int(stream < 3))


def test_a_writer_is_not_displaced_by_readers_that_fail() -> None:
    """A writer is not displaced when two readers of its prefix fail before it has a token.

    Its blocks leave the cache. If they were invalid, the writer would fail itself.
    """
    cluster = _cluster(long_prefill_token_threshold=8)
    neighbour = cluster.submit(3, [*PREFIX[:8], 1], 100)
    while not neighbour.tokens:
        _step(cluster)
    writer = cluster.submit(0, [*PREFIX, *range(60)], 5)
    _step(cluster)
    while _row(cluster, 0).computed < len(PREFIX):
        _step(cluster)
    poison = [cluster.submit(stream, [*PREFIX, stream], 5) for stream in (1, 2)]
    while not any(reader.end for reader in poison):
        cluster.plan_for(PEER, 1)
        for stream in (1, 2):
            if _runs(cluster, stream):
                _fail(cluster, stream, ev.FailureKind.NOT_FINITE)
        cluster.answer()
    cluster.run()

    _check_served(writer, preemptions=0)
    _check_served(neighbour, preemptions=0)


def _leave_spoilt_prefix(cluster: Cluster) -> None:
    """A cached prefix is NaN from its third block on, and the request that wrote it is gone without having failed."""
    cluster.submit(0, [*PREFIX, *range(200)], 5)
    _step(cluster)
    cluster.spoil(0)
    while _row(cluster, 0).computed < len(PREFIX):
        _step(cluster)
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=0))
    cluster.run()


def test_an_invalid_block_leaves_the_cache_after_two_failed_readers() -> None:
    """An invalid block whose writer is gone leaves the cache after two of its readers have failed.

    Each reader is planned again and gets its tokens. The third reader computes the block again and does not fail.
    """
    cluster = _cluster(long_prefill_token_threshold=8)
    _leave_spoilt_prefix(cluster)
    preemptions = []
    for stream in range(1, 5):
        reader = cluster.submit(stream, [*PREFIX, stream], 5)
        cluster.run()
        _check_served(reader, preemptions=_end(reader).preemptions)
        preemptions.append(_end(reader).preemptions)

    assert preemptions == [1, 1, 0, 0]
    assert _end(cluster.readers[4]).cached_prompt_tokens == len(PREFIX)


def test_readers_that_fail_in_one_step_compute_their_prefix_once() -> None:
    """When two readers of an invalid block fail in one step, the block leaves the cache at once.

    Both are planned again and share what the first one computes.
    """
    cluster = _cluster(long_prefill_token_threshold=8)
    _leave_spoilt_prefix(cluster)
    num_plans = len(cluster.plans)
    readers = [cluster.submit(stream, [*PREFIX, stream], 5) for stream in range(1, 7)]
    cluster.run()

    for reader in readers:
        _check_served(reader, preemptions=1)
    num_tokens = sum(plan.num_tokens for plan in cluster.plans[num_plans:])
    assert num_tokens <= 6 * 1 + len(PREFIX) + 6 * 1 + 6 * 5


def test_a_request_that_fails_by_itself_costs_the_others_nothing() -> None:
    """A request that fails again alone ends, and the valid prefix that it shared stays in the cache."""
    cluster = _cluster()
    cluster.submit(0, [*PREFIX, 1], 5)
    cluster.run()
    poison = cluster.submit(1, [*PREFIX, 2, 2], 5)
    while poison.end is None:
        cluster.plan_for(PEER, 1)
        if _runs(cluster, 1):
            _fail(cluster, 1, ev.FailureKind.NOT_FINITE)
        cluster.answer()

    assert (_end(poison).reason, _end(poison).preemptions) == (ef.EndReason.ROW_FAILED, 1)
    computed_again = [a.num_computed_tokens for plan in cluster.plans for a in plan.admissions if a.stream == 1]
    assert computed_again == [len(PREFIX), 0]
    later = cluster.submit(2, [*PREFIX, 3], 5)
    cluster.run()
    assert _end(later).cached_prompt_tokens == len(PREFIX)
    _check_served(later, preemptions=0)


def test_a_writer_that_has_left_its_row_is_found_by_its_departure() -> None:
    """When a failed writer's request has already left, its blocks leave the cache and their readers are planned again.

    Its client cancels while the failing step is in flight.
    """
    cluster = _cluster(budget=64, long_prefill_token_threshold=8)
    cluster.submit(0, [*PREFIX, *range(8)], 5)
    _step(cluster)
    cluster.spoil(0)
    while _row(cluster, 0).computed < len(PREFIX):
        _step(cluster)
    sharer = cluster.submit(1, [*PREFIX, *range(200, 260)], 5)
    while not _row(cluster, 0).decoding:
        cluster.plan_for(PEER, 1)
        if not _row(cluster, 0).decoding:
            cluster.answer()
    assert cluster.answers[PEER][-1].failures
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=0))
    cluster.run()

    _check_served(sharer, preemptions=1)


def test_a_request_whose_last_step_failed_by_another_is_planned_again() -> None:
    """If another row's invalid KV makes the last step of a request fail, the request is planned again."""
    cluster = _cluster(long_prefill_token_threshold=8)
    _leave_spoilt_prefix(cluster)
    reader = cluster.submit(1, [*PREFIX, 1], 1)
    cluster.run()

    _check_served(reader, preemptions=1)


def test_kv_in_host_memory_of_a_request_that_failed_is_dropped() -> None:
    """KV in host memory that may be invalid is dropped, and its request is computed again.

    A reader of an invalid prefix is swapped out before its first token is known to be NaN.
    """
    cluster = Cluster(max_num_seqs=1, max_num_batched_tokens=64, policy="priority", long_prefill_token_threshold=8)
    cluster.join(ModelWorker(PEER, 400, BLOCK, 1, num_host_blocks=100))
    _leave_spoilt_prefix(cluster)
    reader = cluster.submit(1, [*PREFIX, 1], 5)
    cluster.plan_for(PEER, 1)
    cluster.submit(2, [2, 3], 5, priority=9)
    cluster.plan_for(PEER, 1)
    assert cluster.plans[-1].swap_outs
    cluster.run()

    _check_served(reader, preemptions=1)
    assert not any(plan.swap_ins for plan in cluster.plans)


def test_a_request_is_planned_again_at_most_twice() -> None:
    """A request loses its shared blocks at most twice; then it computes its whole prompt itself and finishes."""
    cluster = _cluster(rows=4, budget=32, long_prefill_token_threshold=8, policy="priority")
    victim: Reader | None = None
    for attack in range(100, 140):
        if victim is not None and victim.end is not None:
            break
        # Each attack runs first, so that the victim reads the KV that it wrote.
        cluster.submit(attack, [*PREFIX, *range(attack, attack + 8)], 5, priority=1)
        while not cluster.readers[attack].end:
            cluster.plan_for(PEER, 1)
            if _runs(cluster, attack):
                cluster.spoil(attack)
            if victim is None:
                victim = cluster.submit(1, [*PREFIX, *range(200, 300)], 5)
            cluster.answer()
    cluster.run()

    assert victim is not None
    _check_served(victim, preemptions=MAX_LOST_PREFIXES)


def test_a_prompt_under_way_is_not_swapped_out() -> None:
    """A started prompt is not swapped out but computed again.

    It may have read KV of a row that fails later, and the failure would not reach the copy in host memory.
    """
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=3, prefix_cache="off")
    cluster.join(ModelWorker(PEER, 24, BLOCK, 2, num_host_blocks=40))
    first = cluster.submit(0, [1, 2, 3], 60)
    while not first.tokens:
        _step(cluster)
    second = cluster.submit(1, list(range(70)), 5)
    cluster.run()

    _check_served(second, preemptions=1)
    assert not any(plan.swap_outs for plan in cluster.plans)


def test_failures_that_a_worker_repeats_or_makes_up_change_nothing() -> None:
    """A row that is reported twice has failed once; a nonexistent row, or one with another generation, has not."""
    cluster = _cluster()
    cluster.submit(0, [*PREFIX, 1], 5)
    cluster.run()
    reader = cluster.submit(1, [*PREFIX, 2], 5)
    cluster.plan()
    _fail(cluster, 1, ev.FailureKind.NOT_FINITE)
    (failure,) = cluster.answers[PEER][0].failures
    made_up = [
        dataclasses.replace(failure, row=row, generation=generation)
        for row, generation in ((-1, 1), (1 << 20, 1), (failure.row, failure.generation + 1))
    ]
    for number, answer in enumerate(cluster.answers[PEER]):
        cluster.answers[PEER][number] = dataclasses.replace(answer, failures=(failure, failure, *made_up))
    cluster.run()

    _check_served(reader, preemptions=1)
    later = cluster.submit(2, [*PREFIX, 3], 5)
    cluster.run()
    assert _end(later).cached_prompt_tokens == len(PREFIX)


def test_doubt_ends_when_a_block_leaves_the_cache() -> None:
    """Only shareable blocks can be doubted, and a reused block is as good as any."""
    cache = PrefixCache(4)
    cache.publish(b"a" * 32 + b"b" * 32, np.array([1, 2]))
    cache.doubt(np.array([0, 1, 2]))
    assert np.flatnonzero(cache.doubted).tolist() == [1, 2]
    cache.forget(np.array([2]))
    assert np.flatnonzero(cache.doubted).tolist() == [1]
    cache.validate()


def test_a_failure_of_another_generation_loses_the_worker() -> None:
    """A result with such a failure instead of a row's token does not match its plan; no token is lost."""
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=64)
    cluster.join(ModelWorker(PEER, 64, 16, 2))
    reader = cluster.submit(1, [1] * 8, 5)
    cluster.plan_for(PEER, most=1)
    answer = cluster.answers[PEER].popleft()
    failure = ev.FailedRow(row=int(answer.rows[0]), generation=99, kind=ev.FailureKind.INTERNAL, reason="why")
    wrong = dataclasses.replace(answer, rows=answer.rows[1:], tokens=answer.tokens[1:], failures=(failure,))
    cluster.handle(wrong)
    assert not cluster.core.workers()
    cluster.join(ModelWorker(b"again", 64, 16, 2))
    cluster.run()
    assert len(reader.tokens) == 5
