"""Requests and workers of different length: no output is truncated because its worker was smaller than another."""

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import EndReason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers.kinds import LONGEST, Kind, Kinds
from tests.scheduler_svc.cluster import Cluster, Reader
from tests.scheduler_svc.operations import count_calls
from tests.scheduler_svc.requests import make_arrival, make_request

LONG, SHORT = 400, 64


def _cluster() -> Cluster:
    return Cluster(max_num_seqs=4, max_num_batched_tokens=64)


def _join(cluster: Cluster, name: str, max_model_len: int) -> None:
    worker = ModelWorker(peer=name.encode(), num_blocks=64, block_size=16, max_rows=4, max_model_len=max_model_len)
    cluster.join(worker, name)


def _some_steps(cluster: Cluster) -> None:
    for _ in range(10):
        cluster.plan()
        cluster.answer()


def _is_whole(reader: Reader) -> bool:
    return len(reader.tokens) == reader.max_tokens and reader.end is not None and reader.end.reason is EndReason.LENGTH


def test_a_drain_moves_a_request_to_a_worker_that_can_carry_its_whole_length() -> None:
    """A less loaded worker with a shorter context does not get the request."""
    cluster = _cluster()
    _join(cluster, "w1", LONG)
    reader = cluster.submit(1, [1] * 20, 300)
    _some_steps(cluster)
    _join(cluster, "w2", LONG)
    for stream in (2, 3):
        cluster.submit(stream, [stream] * 300, 60)
    _some_steps(cluster)
    _join(cluster, "w3", SHORT)
    cluster.handle(ev.DrainRequested(worker_id="w1", move=True))
    cluster.run()
    assert _is_whole(reader)


def test_a_request_that_has_filled_a_short_worker_continues_on_a_longer_one() -> None:
    """While only a shorter worker is there, a request uses it as far as it goes."""
    cluster = _cluster()
    _join(cluster, "w1", LONG)
    reader = cluster.submit(1, [1] * 20, 300)
    _some_steps(cluster)
    _join(cluster, "w3", SHORT)
    cluster.lose(b"w1")
    _some_steps(cluster)
    assert reader.end is None
    _join(cluster, "w1b", LONG)
    cluster.run()
    assert _is_whole(reader)


def test_a_request_that_has_filled_the_only_worker_waits_for_a_longer_one() -> None:
    """It is not completed as if it had reached its limit; without a longer worker it ends for that reason."""
    for longer_comes in (True, False):
        cluster = _cluster()
        _join(cluster, "w3", SHORT)
        reader = cluster.submit(1, [1] * 20, 300, accepted=True, again=True)
        cluster.run()
        assert (len(reader.tokens), reader.end) == (SHORT - 20, None)
        if longer_comes:
            _join(cluster, "w1", LONG)
            cluster.run()
            assert _is_whole(reader)
        else:
            cluster.now += 61.0
            cluster.handle(ev.TimePassed())
            assert reader.end is not None
            assert reader.end.reason is EndReason.NO_WORKER


def test_requests_are_sorted_by_the_shortest_context_that_carries_them() -> None:
    """A request that no worker carries completely goes to the longest ones; one that all carry goes to any."""
    kinds = Kinds(Kind(length, True, "m") for length in (64, 100, 200))
    scopes = {limit: kinds.scope(make_request(prompt=5, limit=limit)) for limit in (64, 65, 100, 101, 200, 1000)}
    lengths = {limit: scope.min_model_len if scope is not None else None for limit, scope in scopes.items()}
    assert lengths == {64: None, 65: 100, 100: 100, 101: 200, 200: 200, 1000: LONGEST}
    assert not kinds.serve(make_request(prompt=200, limit=1000))


def test_the_join_of_a_worker_of_another_length_moves_only_requests_whose_workers_change() -> None:
    """The 64th worker joins at less than four calls for each of 4000 waiting requests, which all workers can carry."""
    core = Scheduler(CoreConfig(max_num_seqs=4, max_num_batched_tokens=64), 1)
    core.handle(ev.FrontendJoined(frontend=b"f"), 1.0)
    for stream in range(4000):
        core.handle(make_arrival(b"f", stream), 1.0)
    hellos = [ModelWorker(b"w%d" % n, 64 + n, 16, 4, max_model_len=1 << 14).hello(f"w{n}") for n in range(64)]
    for hello in hellos[:-1]:
        core.handle(hello, 1.0)
    assert count_calls(lambda: core.handle(hellos[-1], 1.0)) < 4 * 4000
