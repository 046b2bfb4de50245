"""A request with a grammar is planned only where its worker has compiled it, and no other request waits for that."""

from collections.abc import Iterable

import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output, grammar_key
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import GrammarFailure
from scheduler_svc.core.workers.grammars import MAX_ASKED, MAX_FAILED, Grammars
from shared.frames import MAX_GRAMMARS
from tests.scheduler_svc.cluster import Cluster, Reader


def _worker(peer: bytes = b"w/1", max_rows: int = 8) -> ModelWorker:
    return ModelWorker(peer, 64, 4, max_rows)


def _wanted(cluster: Cluster) -> list[tuple[bytes, bytes]]:
    return [(effect.worker, effect.grammar) for effect in cluster.effects if isinstance(effect, ef.GrammarWanted)]


_INVALID = GrammarFailure("too complex", is_invalid=True)
_NO_TOKENIZER = GrammarFailure("no tokenizer.json", is_invalid=False)


def _report(cluster: Cluster, worker: ModelWorker, grammar: bytes, failure: GrammarFailure | None = None) -> None:
    cluster.handle(
        ev.GrammarReported(worker=worker.peer, epoch=worker.epoch, key=grammar_key(grammar), failure=failure)
    )


def _tick(cluster: Cluster) -> None:
    cluster.handle(ev.TimePassed())


def _keys(numbers: Iterable[int]) -> list[bytes]:
    return [number.to_bytes(4) for number in numbers]


def _running_with(cluster: Cluster, worker: ModelWorker, stream: int, key: bytes, max_tokens: int = 50) -> Reader:
    """Start a request with a grammar on the only worker; return when some of its tokens are there."""
    reader = cluster.submit(stream, [1, 2, 3], max_tokens, grammar=key)
    cluster.plan()
    _report(cluster, worker, key)
    for _ in range(4):
        cluster.plan()
        cluster.answer()
    assert reader.tokens
    return reader


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    """The worker is asked once; requests without a grammar or with a compiled one run in the meantime."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=16)
    worker = _worker()
    cluster.join(worker)
    waiting = [cluster.submit(stream, [1, 2, 3], 5, grammar=b"g") for stream in (1, 2)]
    free = cluster.submit(3, [4, 5], 5)
    cluster.run()

    assert _wanted(cluster) == [(b"w/1", b"g")]
    assert free.tokens == expected_output([4, 5], 5, set())
    assert all(reader.end is None and reader.tokens == [] for reader in waiting)

    _report(cluster, worker, b"g")
    later = cluster.submit(4, [6], 3, grammar=b"g")
    cluster.run()

    assert [reader.tokens for reader in waiting] == [expected_output([1, 2, 3], 5, set())] * 2
    assert later.tokens == expected_output([6], 3, set())
    assert len(_wanted(cluster)) == 1


def test_an_invalid_grammar_ends_the_requests_that_wait_for_it() -> None:
    """Requests that wait for an invalid grammar end INVALID with the reason, and so does a later one.

    The worker is not asked again. A report without a question has no effect.
    """
    cluster = Cluster()
    worker = _worker()
    cluster.join(worker)
    bad = [cluster.submit(stream, [1], 5, grammar=b"g") for stream in (1, 2)]
    good = cluster.submit(3, [1], 5, grammar=b"h")
    cluster.run()

    _report(cluster, worker, b"g", _INVALID)
    _report(cluster, worker, b"i")
    for reader in bad:
        assert reader.end is not None
        assert (reader.end.reason, reader.end.field, reader.end.message) == (
            ef.EndReason.INVALID,
            "grammar",
            "too complex",
        )
    assert good.end is None
    later = cluster.submit(4, [1], 5, grammar=b"g")
    cluster.submit(5, [1], 5, grammar=b"i")
    cluster.run()
    _tick(cluster)
    assert later.end is not None
    assert later.end.reason is ef.EndReason.INVALID
    assert [key for _, key in _wanted(cluster)] == [b"g", b"h", b"i"]


@pytest.mark.parametrize("failure", [_INVALID, _NO_TOKENIZER])
def test_a_failure_of_one_worker_ends_nothing_where_the_grammar_is_compiled(failure: GrammarFailure) -> None:
    """When one worker fails to compile a grammar, requests continue on another worker that has compiled it.

    A waiting request is admitted there, too.
    """
    cluster = Cluster(max_num_seqs=2)
    first, second = _worker(max_rows=2), _worker(b"w/2", max_rows=2)
    cluster.join(first, "w1")
    running = _running_with(cluster, first, 1, b"g")
    cluster.join(second, "w2")
    waiting = [cluster.submit(stream, [4, stream], 50, grammar=b"g") for stream in (2, 3)]
    while (b"w/2", b"g") not in _wanted(cluster):
        assert cluster.plan() + cluster.answer()

    _report(cluster, second, b"g", failure)
    _tick(cluster)
    assert all(reader.end is None for reader in (running, *waiting))
    cluster.run()

    assert running.tokens == expected_output([1, 2, 3], 50, set())
    assert [reader.tokens for reader in waiting] == [expected_output([4, stream], 50, set()) for stream in (2, 3)]


def test_a_grammar_that_a_worker_is_unable_to_use_waits_for_the_other_workers() -> None:
    """Only when none is left that may compile it does a request that waits for it end, as one that lacks a worker."""
    cluster = Cluster()
    first, second = _worker(), _worker(b"w/2")
    cluster.join(first, "w1")
    reader = cluster.submit(1, [1, 2], 5, grammar=b"g")
    cluster.run()
    cluster.join(second, "w2")

    _report(cluster, first, b"g", _NO_TOKENIZER)
    _tick(cluster)
    assert reader.end is None
    cluster.lose(second.peer)
    _tick(cluster)

    assert reader.end is not None
    assert reader.end.reason is ef.EndReason.NO_WORKER
    assert reader.end.message == "no worker can use the grammar: no tokenizer.json"


@pytest.mark.parametrize("event", ["lost", "drained"])
def test_a_request_ends_when_its_only_worker_leaves(event: str) -> None:
    """The request ran where its grammar was compiled.

    The remaining worker has reported that it cannot use the grammar.
    """
    cluster = Cluster()
    first, second = _worker(max_rows=1), _worker(b"w/2")
    cluster.join(first, "w1")
    reader = _running_with(cluster, first, 1, b"g")
    cluster.join(second, "w2")
    other = cluster.submit(2, [7], 5, grammar=b"g")
    cluster.plan()
    _report(cluster, second, b"g", _NO_TOKENIZER)

    if event == "lost":
        cluster.lose(first.peer)
    else:
        cluster.handle(ev.DrainRequested(worker_id="w1", move=True))
    _tick(cluster)

    assert reader.end is not None
    assert other.end is not None
    assert reader.end.reason is other.end.reason is ef.EndReason.NO_WORKER


def test_another_worker_is_asked_anew() -> None:
    """After a loss, the request continues with its tokens where its grammar is compiled again."""
    cluster = Cluster()
    first, second = _worker(), _worker(b"w/2")
    cluster.join(first)
    reader = cluster.submit(1, [1, 2, 3], 9, grammar=b"g")
    cluster.run()
    _report(cluster, first, b"g")
    cluster.plan()
    cluster.answer()
    assert reader.tokens

    cluster.lose(first.peer)
    cluster.join(second)
    cluster.run()
    assert _wanted(cluster) == [(b"w/1", b"g"), (b"w/2", b"g")]
    _report(cluster, first, b"g")  # from the past
    cluster.run()
    assert reader.end is None
    _report(cluster, second, b"g")
    cluster.run()
    assert reader.tokens == expected_output([1, 2, 3], 9, set())


def test_the_worker_drops_what_was_used_longest_ago() -> None:
    """The scheduler names the grammars to drop, so that both sides agree; a dropped grammar is requested again."""
    grammars, first, *others = Grammars(), *_keys(range(MAX_GRAMMARS + 1))
    dropped: list[bytes] = []
    for key in (first, *others):
        assert grammars.ask(key)
        dropped += grammars.make_room()
        assert grammars.reported(key)
        assert grammars.is_ready(first)

    assert dropped == others[:1]
    assert not grammars.is_ready(others[0])
    assert grammars.ask(others[0])
    assert grammars.make_room() == (others[1],)
    assert grammars.is_ready(b"")


def test_a_grammar_that_a_row_uses_is_never_dropped() -> None:
    """A used grammar does not count among the unused ones, and is the most recently used when its last row ends."""
    grammars, used, *others = Grammars(), *_keys(range(2 * MAX_GRAMMARS))
    grammars.ask(used)
    grammars.reported(used)
    for _ in range(2):
        grammars.occupied(used)
    dropped: list[bytes] = []
    for key in others:
        grammars.ask(key)
        dropped += grammars.make_room()
        grammars.reported(key)
    grammars.vacated(used)
    grammars.validate({used: 1})
    grammars.vacated(used)
    grammars.validate({})

    assert dropped == others[: len(others) - MAX_GRAMMARS]
    assert grammars.ask(b"one more")
    assert used not in grammars.make_room()


def test_a_worker_is_asked_for_so_many_grammars_at_a_time() -> None:
    """The order of the other grammars stays with the queue; each report makes room for another compilation."""
    grammars, keys = Grammars(), _keys(range(MAX_ASKED + 1))

    assert [grammars.ask(key) for key in keys] == [True] * MAX_ASKED + [False]
    grammars.reported(keys[3])
    assert grammars.ask(keys[-1])
    assert not grammars.ask(keys[-1])


def test_so_many_failures_of_a_worker_are_remembered() -> None:
    """A failed grammar is not asked for again before it is forgotten."""
    grammars, keys = Grammars(), _keys(range(MAX_FAILED + 1))
    for key in keys:
        assert grammars.ask(key)
        grammars.reported(key, _NO_TOKENIZER)

    assert [grammars.is_failed(key) for key in keys] == [False] + [True] * MAX_FAILED
    assert grammars.failure(keys[1]) == _NO_TOKENIZER
    assert grammars.ask(keys[0])
    assert not grammars.ask(keys[1])


def test_an_invalid_grammar_ends_its_requests_even_if_a_draining_worker_reports_it() -> None:
    """What is wrong with the grammar itself is wrong everywhere."""
    cluster, worker = Cluster(), _worker()
    cluster.join(worker)
    waiting = cluster.submit(1, [1], 5, grammar=b"g")
    cluster.plan()
    cluster.handle(ev.DrainRequested(worker_id="w", move=False))
    _report(cluster, worker, b"g", _INVALID)
    _tick(cluster)

    assert waiting.end is not None
    assert waiting.end.reason is ef.EndReason.INVALID


def test_a_worker_that_is_resumed_without_the_grammar_ends_the_requests_that_wait_for_it() -> None:
    """A worker's own failure decides nothing while it drains, but decides once it is the only worker."""
    cluster, worker = Cluster(), _worker()
    cluster.join(worker)
    waiting = cluster.submit(1, [1], 5, grammar=b"g")
    cluster.plan()
    cluster.handle(ev.DrainRequested(worker_id="w", move=False))
    _report(cluster, worker, b"g", _NO_TOKENIZER)
    _tick(cluster)
    assert waiting.end is None

    cluster.handle(ev.ResumeRequested(worker_id="w"))
    _tick(cluster)

    assert waiting.end is not None
    assert waiting.end.reason is ef.EndReason.NO_WORKER


def test_a_compiled_grammar_is_found_however_many_others_are_awaited() -> None:
    """A worker with a request's grammar serves it when it has room, while thirty other grammars are compiled."""
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"A", num_blocks=64, block_size=16, max_rows=2), "A")
    cluster.submit(1, [1] * 8, 5, grammar=b"G")
    cluster.plan()
    (wanted,) = [effect for effect in cluster.effects if isinstance(effect, ef.GrammarWanted)]
    cluster.handle(ev.GrammarReported(worker=b"A", epoch=wanted.epoch, key=wanted.key, failure=None))
    cluster.run()
    for stream in (2, 3):
        cluster.submit(stream, [stream] * 8, 40)
    cluster.plan()
    cluster.join(ModelWorker(b"B", num_blocks=64, block_size=16, max_rows=2), "B")
    for stream in range(100, 130):
        cluster.submit(stream, [stream] * 8, 5, grammar=b"slow%d" % stream)
    for _ in range(3):
        cluster.plan()
        cluster.answer()
    reader = cluster.submit(9, [9] * 8, 5, grammar=b"G")
    for _ in range(60):
        cluster.plan()
        cluster.answer()
    assert reader.end is not None
