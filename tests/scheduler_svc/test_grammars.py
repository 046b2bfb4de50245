"""A request with a grammar is planned only where its worker has compiled it, and nobody else waits for that."""

from scheduler_svc.core import effects as ef
from scheduler_svc.core import events as ev
from scheduler_svc.core.grammars import MAX_READY, Grammars
from scheduler_svc.sim.model_worker import ModelWorker
from scheduler_svc.sim.oracle import expected_output
from tests.scheduler_svc.cluster import Cluster


def _worker(peer: bytes = b"w/1", max_rows: int = 8) -> ModelWorker:
    return ModelWorker(peer, 64, 4, max_rows)


def _wanted(cluster: Cluster) -> list[tuple[bytes, bytes]]:
    return [(effect.worker, effect.key) for effect in cluster.effects if isinstance(effect, ef.GrammarWanted)]


def _report(cluster: Cluster, worker: ModelWorker, key: bytes, failure: str = "") -> None:
    cluster.handle(ev.GrammarReported(worker=worker.peer, epoch=worker.epoch, key=key, failure=failure))


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    """The worker is asked once, whoever has no grammar or a ready one runs meanwhile, and then the request runs too."""
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


def test_a_grammar_that_cannot_be_compiled_ends_its_requests() -> None:
    """All that have it end INVALID with the reason; a later one asks again; a report nobody asked for means nothing."""
    cluster = Cluster()
    worker = _worker()
    cluster.join(worker)
    bad = [cluster.submit(stream, [1], 5, grammar=b"g") for stream in (1, 2)]
    good = cluster.submit(3, [1], 5, grammar=b"h")
    cluster.run()

    _report(cluster, worker, b"g", "too complex")
    _report(cluster, worker, b"i")
    for reader in bad:
        assert reader.end is not None
        assert (reader.end.reason, reader.end.message) == (ef.EndReason.INVALID, "grammar: too complex")
    assert good.end is None
    cluster.submit(4, [1], 5, grammar=b"g")
    cluster.submit(5, [1], 5, grammar=b"i")
    cluster.run()
    assert [key for _, key in _wanted(cluster)] == [b"g", b"h", b"g", b"i"]


def test_another_worker_is_asked_anew() -> None:
    """After a loss the request goes on where its grammar has been compiled again, with the tokens it has."""
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


def test_what_was_used_longest_ago_is_asked_for_again() -> None:
    """The memory of what a worker has compiled is bounded."""
    grammars = Grammars()
    for number in range(MAX_READY + 1):
        key = number.to_bytes(4)
        assert grammars.ask(key)
        assert grammars.reported(key, usable=True)
        assert grammars.is_ready((0).to_bytes(4))

    assert not grammars.is_ready((1).to_bytes(4))
    assert grammars.ask((1).to_bytes(4))
    assert not grammars.ask((1).to_bytes(4))
    assert grammars.is_ready(b"")
