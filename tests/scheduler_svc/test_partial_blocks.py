"""What `--prefix-cache radix` promises: parts of blocks are shared by copying, with the same tokens, within a scope."""

import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan
from tests.scheduler_svc.cluster import FRONTEND, Cluster, Reader

BLOCK_SIZE = 8
PREFIX = list(range(100, 142))
"""Five blocks and two tokens."""


class RecordingWorker(ModelWorker):
    """A model worker that remembers its plans."""

    plans: list[Plan]

    def execute(self, plan: Plan) -> ev.StepDone:
        """As every model worker, which also checks what is copied."""
        self.plans.append(plan)
        return super().execute(plan)


def _cluster(num_blocks: int = 100, **limits: object) -> tuple[Cluster, RecordingWorker]:
    cluster = Cluster(**({"max_num_seqs": 8, "max_num_batched_tokens": 16, "prefix_cache": "radix"} | limits))
    worker = RecordingWorker(b"w/1", num_blocks, BLOCK_SIZE, 8)
    worker.plans = []
    cluster.join(worker)
    return cluster, worker


def _serve(cluster: Cluster, stream: int, prompt: list[int], count: int = 5, *, salt: bytes = b"") -> int:
    """Serve one request alone; return how many prompt tokens were cached."""
    reader = cluster.submit(stream, prompt, count, salt=salt)
    cluster.run()
    return _cached(reader)


def _cached(reader: Reader) -> int:
    assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())
    assert reader.end is not None
    return reader.end.cached_prompt_tokens


def _num_copied(worker: RecordingWorker) -> int:
    return sum(len(plan.copy_sources) for plan in worker.plans)


def test_a_prefix_is_shared_to_its_last_token() -> None:
    """A request that shares a sequence up to the middle of a block computes only its own tokens."""
    cluster, worker = _cluster()
    _serve(cluster, 1, [*PREFIX, 1, 2, 3])
    before = cluster.core.stats().workers[0].counters.scheduled_tokens

    assert _serve(cluster, 2, [*PREFIX, 7, 8, 9]) == 42

    counters = cluster.core.stats().workers[0].counters
    assert (counters.cached_tokens, counters.scheduled_tokens - before) == (42, 3 + 4)
    assert _num_copied(worker) == 1


@pytest.mark.parametrize(("prefix_cache", "cached"), [("radix", 42), ("hash", 40), ("off", 0)])
def test_hash_finds_full_blocks_and_off_finds_none(prefix_cache: str, cached: int) -> None:
    """`hash` finds full blocks and `off` finds none, and neither copies blocks."""
    cluster, worker = _cluster(prefix_cache=prefix_cache)
    _serve(cluster, 1, [*PREFIX, 1, 2, 3])

    assert _serve(cluster, 2, [*PREFIX, 7, 8, 9]) == cached

    assert _num_copied(worker) == (prefix_cache == "radix")


def test_the_longest_agreement_is_copied() -> None:
    """Of the blocks that follow a prefix, the one with the longest agreement is copied.

    Candidates are the next block of the same run, the first of several branches, and the partly filled last block of an
    ended sequence.
    """
    cluster, _ = _cluster()
    full = PREFIX[:40]
    _serve(cluster, 1, [*full, 1, 1, 2, 2, 2, 2, 2, 2, 2])
    _serve(cluster, 2, [*full, 1, 1, 1, 3, 3, 3, 3, 3, 3])
    _serve(cluster, 3, [*full, 1, 1, 1, 1, 4], 1)

    assert _serve(cluster, 4, [*full, 1, 1, 2, 2, 9, 9]) == 44
    assert _serve(cluster, 5, [*full, 1, 1, 1, 3, 3, 9]) == 45
    assert _serve(cluster, 6, [*full, 1, 1, 1, 1, 4, 9, 9]) == 45
    assert _serve(cluster, 7, [*PREFIX[:12], 9, 9]) == 12


def test_within_a_run_its_next_block_and_what_ended_there_are_compared() -> None:
    """If a longer sequence continues and another ended there, the block with the longer match is copied."""
    cluster, _ = _cluster()
    _serve(cluster, 1, PREFIX)
    _serve(cluster, 2, [*PREFIX[:10], 9, 9], 1)

    assert _serve(cluster, 3, [*PREFIX[:12], 7, 7]) == 12
    assert _serve(cluster, 4, [*PREFIX[:10], 9, 9, 7]) == 12


def test_the_last_token_is_always_computed() -> None:
    """A completely known prompt is copied except for its last token, whose logits are needed."""
    cluster, _ = _cluster()
    _serve(cluster, 1, [*PREFIX, 1, 2])

    assert _serve(cluster, 2, [*PREFIX, 1, 2]) == 43
    assert _serve(cluster, 3, PREFIX[:40]) == 39


def test_an_answer_is_shared_with_the_next_turn() -> None:
    """The next turn finds its history, including generated tokens, up to the last token sampled before the end."""
    cluster, _ = _cluster()
    first = cluster.submit(1, PREFIX, 20)
    cluster.run()

    found = _serve(cluster, 2, [*PREFIX, *first.tokens, 7, 8])

    assert len(PREFIX) + 20 - 3 <= found < len(PREFIX) + 20
    assert found % BLOCK_SIZE


def test_fewer_tokens_than_are_worth_a_copy_are_computed() -> None:
    """A quarter of a block is copied, less is not."""
    cluster, worker = _cluster()
    _serve(cluster, 1, [*PREFIX, 1, 2, 3])

    assert _serve(cluster, 2, [*PREFIX[:41], 7, 8]) == 40
    assert not _num_copied(worker)
    assert _serve(cluster, 3, [*PREFIX[:42], 7, 8]) == 42


def test_another_salt_finds_not_even_a_token() -> None:
    """A request matches parts of first blocks only under its own salt, so that it cannot probe other prompts."""
    cluster, worker = _cluster()
    _serve(cluster, 1, PREFIX, salt=b"alice")
    _serve(cluster, 2, [9, *PREFIX[:4]], salt=b"alice")

    assert _serve(cluster, 3, [*PREFIX[:5], 9], salt=b"bob") == 0
    assert _serve(cluster, 4, [9, *PREFIX[:4], 9], salt=b"bob") == 0
    assert _serve(cluster, 5, [*PREFIX, 9], salt=b"carol") == 0
    assert _num_copied(worker) == 0
    assert _serve(cluster, 6, [*PREFIX[:5], 8], salt=b"alice") == 5
    assert _serve(cluster, 7, [*PREFIX[:5], 8], salt=b"bob") == 5


def test_nothing_is_copied_before_a_token_proved_it() -> None:
    """A block is shared but not copied while its row has not sampled a token.

    The step that writes the block may be this one, in flight, or complete. The content is missing or may be invalid.
    """
    cluster, worker = _cluster(max_num_batched_tokens=64, long_prefill_token_threshold=16, policy="fcfs")
    cluster.submit(1, [*PREFIX, 1, 2, 3], 20)
    cluster.submit(2, [*PREFIX[:12], 2, 2], 20)
    cluster.plan()
    cluster.answer()
    cluster.submit(3, [*PREFIX[:12], 3, 3], 20)
    cluster.plan()
    assert [len(plan.admissions) for plan in worker.plans] == [2, 0, 1]
    assert not _num_copied(worker)
    cluster.answer()
    cluster.answer()
    cluster.submit(4, [*PREFIX[:12], 4, 4], 20)
    cluster.plan()
    assert _num_copied(worker) == 1
    cluster.run()
    assert [_cached(reader) for reader in cluster.readers.values()] == [0, 8, 8, 12]


def test_blocks_of_a_failed_row_are_not_copied() -> None:
    """A failed row's blocks are not copied; a request that copied proven content before is not affected."""
    cluster, worker = _cluster()
    cluster.submit(0, [*PREFIX, 1], 30)
    while not cluster.readers[0].tokens:
        cluster.plan()
        cluster.answer()
    cluster.submit(1, [*PREFIX[:36], 2, 2, 2], 4)
    cluster.plan()
    assert _num_copied(worker) == 1
    cluster.spoil(0)
    cluster.run()
    assert cluster.readers[0].end is not None
    assert cluster.readers[0].end.reason is ef.EndReason.ROW_FAILED
    assert _cached(cluster.readers[1]) == 36

    assert _serve(cluster, 2, [*PREFIX[:38], 3, 3, 3]) == 36


def test_a_source_is_kept_until_the_copy_is_answered() -> None:
    """The source of a copy is not allocated before the plan is answered, although no request holds it.

    This includes a request in the same plan that would then fit.
    """
    cluster, worker = _cluster(num_blocks=12)
    _serve(cluster, 1, [*PREFIX[:12], 1])
    cluster.submit(2, [*PREFIX[:12], 2], 4)
    cluster.submit(3, [3] * 75, 4)
    num_plans = len(worker.plans)

    cluster.run()

    assert [len(plan.admissions) for plan in worker.plans[num_plans:] if plan.admissions] == [1, 1]
    assert [_cached(reader) for reader in cluster.readers.values()] == [0, 12, 0]


def test_a_request_that_needs_all_memory_copies_nothing() -> None:
    """When the block to copy from is needed itself, the request is computed instead of waiting."""
    cluster, worker = _cluster(num_blocks=5, max_num_seqs=1)
    _serve(cluster, 1, [*PREFIX[:12], 1])

    assert _serve(cluster, 2, [*PREFIX[:12], *[7] * 22]) == 8

    assert not _num_copied(worker)


def test_one_token_answers_are_copied_from_as_well() -> None:
    """A request that leaves its row before its only token arrives still leaves its blocks in the cache."""
    cluster, _ = _cluster()
    _serve(cluster, 1, [*PREFIX, 1], 1)

    assert _serve(cluster, 2, [*PREFIX, 2], 1) == 42


def test_a_cancelled_prompt_leaves_full_blocks_only() -> None:
    """A request that ends before it has sampled proves nothing, so its last block is not kept."""
    cluster, worker = _cluster(max_num_batched_tokens=19)
    cluster.submit(1, [*PREFIX, 1], 5)
    cluster.plan()
    cluster.answer()
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1))
    cluster.run()
    assert sum(plan.num_tokens for plan in worker.plans) == 38

    assert _serve(cluster, 2, [*PREFIX[:20], 2, 2]) == 16
    assert _serve(cluster, 3, [*PREFIX, 2]) == 32
    assert not _num_copied(worker)


def test_blocks_of_a_cancelled_row_are_copied_only_after_its_answer() -> None:
    """If a row leaves before its newest token arrives, only the token's arrival proves the row's blocks."""
    cluster, worker = _cluster(max_num_batched_tokens=64)
    cluster.submit(1, [*PREFIX, 1], 20)
    assert cluster.plan_for(b"w/1", most=1) == 1
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1))
    cluster.submit(2, [*PREFIX, 2], 1)
    cluster.plan()
    assert [admission.num_computed_tokens for plan in worker.plans for admission in plan.admissions] == [0, 40]
    assert not _num_copied(worker)
    cluster.run()
    cluster.submit(3, [*PREFIX, 3], 1)
    cluster.run()
    assert _num_copied(worker) == 1


def test_the_same_ends_are_kept_once() -> None:
    """Requests with equal ends leave one copy of their last block; the rest of their memory is free."""
    cluster, _ = _cluster()
    for stream in range(4):
        _serve(cluster, stream, [*PREFIX[:12], 1], 3)
    (worker,) = cluster.core.stats().workers
    assert worker.blocks_cached == 2


def test_an_end_too_short_for_a_copy_is_not_kept() -> None:
    """A last block with fewer tokens than are worth a copy is free when its sequence has ended."""
    cluster, _ = _cluster()
    _serve(cluster, 1, PREFIX[:17], 1)
    assert cluster.core.stats().workers[0].blocks_cached == 2
    _serve(cluster, 2, PREFIX[10:28], 1)
    assert cluster.core.stats().workers[0].blocks_cached == 2 + 3


def test_several_requests_copy_the_same_block() -> None:
    """Several requests may copy from one block at once; each copies to its own block."""
    cluster, worker = _cluster()
    _serve(cluster, 1, [*PREFIX, 1])
    for stream in (2, 3):
        cluster.submit(stream, [*PREFIX, stream, stream], 3)
    cluster.run()
    (plan,) = [plan for plan in worker.plans if len(plan.copy_sources)]
    assert len(set(plan.copy_sources.tolist())) == 1
    assert len(set(plan.copy_targets.tolist())) == 2
    assert [_cached(reader) for reader in cluster.readers.values()] == [0, 42, 42]
