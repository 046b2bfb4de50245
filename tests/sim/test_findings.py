"""Errors that the simulator found in the core, each as the shortest history that shows it."""

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output, grammar_key
from scheduler_svc.core.interface import events as ev
from tests.scheduler_svc.cluster import Cluster


def test_equal_ranks_under_memory_pressure() -> None:
    """If two rows of equal rank need the last free block at once, one is preempted and gets none."""
    cluster = Cluster(policy="edf", max_num_seqs=4, max_num_batched_tokens=16, policy_preemption="off")
    cluster.join(ModelWorker(b"w/1", 3, 4, 8))
    at = cluster.now + 100.0
    for stream in range(2):
        cluster.submit(stream, [stream, 2, 3], 8, ttft_deadline=at)
    cluster.run()
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, 8, set())


def test_blocks_computed_from_a_failed_rows_prefix_are_not_shared() -> None:
    """When a row fails, later requests find neither its blocks nor those computed from them."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=8, max_plans_in_flight=2)
    worker = ModelWorker(b"w/1", 200, 4, 8)
    cluster.join(worker)
    prefix = list(range(100, 124))
    longer = [*prefix, *range(300, 312)]
    cluster.submit(0, [*prefix, *range(200, 206)], 8)
    cluster.plan()
    worker.fail(0, spoil=True)
    cluster.submit(1, longer, 8)
    # Tokens 16 to 23 of the prefix are corrupted, then the second request shares them, then the failure is reported.
    for _ in range(4):
        cluster.answer()
        cluster.plan()
    cluster.run()

    for stream in (2, 3):
        reader = cluster.submit(stream, [*longer, stream], 8)
        cluster.run()
        assert reader.tokens == expected_output(reader.prompt, 8, set())


def test_a_suspect_waits_for_its_grammar() -> None:
    """A suspect that runs alone starts only after its grammar is compiled; meanwhile others run."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=16)
    suspect = cluster.submit(1, [1, 2, 3], 6, grammar=b"g")
    for number in (1, 2):
        worker = ModelWorker(b"w/%d" % number, 64, 4, 8)
        cluster.join(worker)
        cluster.plan()
        cluster.handle(ev.GrammarReported(worker=worker.peer, epoch=worker.epoch, key=grammar_key(b"g")))
        assert cluster.plan()
        cluster.lose(worker.peer)
    last = ModelWorker(b"w/3", 64, 4, 8)
    cluster.join(last)
    other = cluster.submit(2, [4, 5], 5)
    cluster.run()
    assert (suspect.tokens, other.tokens) == ([], expected_output([4, 5], 5, set()))

    cluster.handle(ev.GrammarReported(worker=last.peer, epoch=last.epoch, key=grammar_key(b"g")))
    cluster.run()
    assert suspect.tokens == expected_output([1, 2, 3], 6, set())


def test_a_grammar_that_only_a_worker_too_small_can_compile() -> None:
    """A request ends when the only worker that is large enough cannot compile its grammar."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=16)
    small, large = ModelWorker(b"w/1", 2, 4, 8), ModelWorker(b"v/1", 64, 4, 8)
    cluster.join(small, "w")
    cluster.join(large, "v")
    reader = cluster.submit(1, list(range(1, 13)), 6, grammar=b"g")
    cluster.plan()
    died = ev.GrammarFailure("its compiler died", is_invalid=False)
    for worker, failure in ((small, None), (large, died)):
        cluster.handle(
            ev.GrammarReported(worker=worker.peer, epoch=worker.epoch, key=grammar_key(b"g"), failure=failure)
        )
        cluster.plan()
    cluster.handle(ev.TimePassed())
    assert reader.end is not None
