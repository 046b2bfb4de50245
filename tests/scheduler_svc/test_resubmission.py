"""Requests that one core accepted and the next one receives.

They end by completion, by their client, at their deadline, or because no worker serves their model.
"""

import dataclasses
from collections import Counter, deque

import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_embedding, expected_output
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import TenantLimits
from scheduler_svc.core.interface.records import EndReason
from shared.request_spec import Pooling
from tests.scheduler_svc.cluster import FRONTEND, Cluster, Reader

PROMPT = [1, 2, 3]
WAIT_S = 60.0


def _worker(peer: bytes = b"w/1", *, num_blocks: int = 400, model: str = "f") -> ModelWorker:
    return ModelWorker(peer, num_blocks, 4, 8, fingerprint=model)


def _resubmit(cluster: Cluster, stream: int, delivered: int, max_tokens: int = 30, **more: object) -> Reader:
    """Submit a request that an earlier core accepted, with the tokens which that core had delivered."""
    prompt = [*PROMPT, stream]
    tokens = tuple(expected_output(prompt, max_tokens, set())[:delivered])
    return cluster.submit(stream, prompt, max_tokens, delivered=tokens, again=True, accepted=True, **more)  # type: ignore[arg-type]


def _join_without_embeddings(cluster: Cluster, worker: ModelWorker) -> ModelWorker:
    """A worker of an older version says hello."""
    hello = worker.hello("old")
    hello = dataclasses.replace(hello, model=dataclasses.replace(hello.model, hidden_size=0))
    for effect in cluster.handle(hello):
        if isinstance(effect, ef.WorkerWelcomed):
            worker.welcome(effect.epoch)
            cluster.workers[worker.peer] = worker
            cluster.answers[worker.peer] = deque()
    return worker


def _reasons(cluster: Cluster) -> Counter[str]:
    return Counter(reader.end.reason.name if reader.end else "LIVE" for reader in cluster.readers.values())


def _pass(cluster: Cluster, seconds: float) -> None:
    """Time passes, a second at a time, and the core looks at it."""
    for _ in range(int(seconds)):
        cluster.now += 1.0
        cluster.handle(ev.TimePassed())


@pytest.mark.parametrize(
    "limits",
    [
        {"max_queued_requests": 4},
        {"max_queued_tokens": 30},
        {"tenant_limits": {"a": TenantLimits(max_running=2, max_queued=2)}},
        {"tenant_limits": {"": TenantLimits(max_queued=1, tokens_per_s=5.0)}},
    ],
    ids=["queue, requests", "queue, tokens", "tenant, requests", "every tenant"],
)
def test_a_full_queue_does_not_refuse_what_was_accepted_before(limits: dict[str, object]) -> None:
    """A core completes all requests that the previous core accepted, although its queue is too short for them.

    Half of the sixteen streams have no token yet. New requests are refused until the queue is short enough.
    """
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=64, **limits)
    for stream in range(16):
        _resubmit(cluster, stream, delivered=10 * (stream % 2), tenant="a")
    assert _reasons(cluster) == {"LIVE": 16}
    new = cluster.submit(99, PROMPT, 5, tenant="a")
    assert new.end is not None
    expected = EndReason.TENANT_LIMIT if "tenant_limits" in limits else EndReason.QUEUE_FULL
    assert new.end.reason is expected
    del cluster.readers[99]

    cluster.join(_worker())
    while "LIVE" in _reasons(cluster):
        cluster.run()
        _pass(cluster, 1)

    assert _reasons(cluster) == {"LENGTH": 16}
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, 30, set())
    assert cluster.submit(100, PROMPT, 5, tenant="a").end is None


@pytest.mark.parametrize("policy", ["fcfs", "edf"])
@pytest.mark.parametrize("delivered", [0, 10])
def test_no_forecast_refuses_what_was_accepted_before(policy: str, delivered: int) -> None:
    """A resubmitted request is not refused because it will probably miss its deadline; the deadline itself ends it."""
    cluster = Cluster(policy=policy, max_num_seqs=2, max_num_batched_tokens=64)
    cluster.join(_worker())
    for stream in range(4):
        cluster.submit(stream, PROMPT, 50)
    cluster.run()
    cluster.submit(4, PROMPT, 500)
    cluster.plan()
    cluster.submit(5, PROMPT, 500)

    late = _resubmit(cluster, 9, delivered, 3000, deadline=cluster.now + 0.5, expected_output_tokens=3000)
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=5))
    while len(late.tokens) == delivered:
        assert late.end is None
        assert cluster.plan() + cluster.answer()
    _pass(cluster, 1)

    assert late.end is not None
    assert late.end.reason is EndReason.DEADLINE
    assert late.end.message == "the deadline passed before the answer was complete"


# ---------------------------------------------------------------- the worker with the request's model


def test_requests_that_came_again_wait_for_a_worker_of_their_model() -> None:
    """While resubmitted requests wait for a worker with their model, a new core refuses workers with another model.

    They continue as soon as a worker of their model has joined.
    """
    cluster = Cluster(worker_wait_s=WAIT_S)
    for stream in range(3):
        _resubmit(cluster, stream, delivered=10, model="f")
    stranger = cluster.handle(_worker(b"w/g", model="g").hello("g"))
    assert [type(effect) for effect in stranger] == [ef.WorkerRefused]
    assert isinstance(stranger[0], ef.WorkerRefused)
    assert "wait for a worker" in stranger[0].reason

    _pass(cluster, WAIT_S - 5)
    cluster.join(_worker())
    cluster.run()

    assert _reasons(cluster) == {"LENGTH": 3}
    assert all(reader.tokens == expected_output(reader.prompt, 30, set()) for reader in cluster.readers.values())


def test_another_model_is_locked_out_no_longer_than_requests_wait_for_theirs() -> None:
    """After `worker_wait_s` without a worker of their model, requests end, and another model may be served.

    The reason is NO_WORKER. This holds although new requests for the first model arrive. The other model does not
    compute them.
    """
    cluster = Cluster(worker_wait_s=WAIT_S)
    cluster.handle(ev.TimePassed())
    begun = [_resubmit(cluster, stream, delivered=10, model="f") for stream in range(3)]
    _pass(cluster, WAIT_S / 2)
    late = _resubmit(cluster, 4, delivered=10, model="f")
    _pass(cluster, WAIT_S / 2 + 2)
    assert [reader.end.reason for reader in begun if reader.end] == [EndReason.NO_WORKER] * 3
    assert late.end is None

    cluster.join(_worker(b"w/g", model="g"), "g")
    own = cluster.submit(5, PROMPT, 20, model="g")
    cluster.run()

    assert own.tokens == expected_output(PROMPT, 20, set())
    assert (late.end, len(late.tokens)) == (None, 10)
    _pass(cluster, WAIT_S + 2)
    assert late.end is not None
    assert (late.end.reason, len(late.tokens)) == (EndReason.NO_WORKER, 10)


def test_a_worker_that_is_too_small_does_not_cut_short_what_a_larger_one_began() -> None:
    """A long resubmitted request waits for a large worker when a small one joins first.

    Without a large worker the request ends with NO_WORKER after `worker_wait_s`. A new request of this length is
    refused at once.
    """
    for large_comes in (True, False):
        cluster = Cluster(worker_wait_s=WAIT_S, max_num_seqs=4, max_num_batched_tokens=64)
        cluster.join(_worker(b"s/1", num_blocks=4), "small")
        long = [_resubmit(cluster, 1, delivered=20), cluster.submit(2, [7] * 20, 10, again=True, accepted=True)]
        short = _resubmit(cluster, 3, delivered=2, max_tokens=8)
        new = cluster.submit(4, [7] * 20, 10)
        cluster.run()
        assert [reader.end for reader in long] == [None, None]
        assert short.tokens == expected_output(short.prompt, 8, set())
        assert new.end is not None
        assert new.end.reason is EndReason.INVALID

        _pass(cluster, WAIT_S - 10)
        if large_comes:
            cluster.join(_worker(b"l/1"), "large")
            cluster.run()
        _pass(cluster, 15)

        assert all(reader.end for reader in long)
        reasons = [reader.end.reason for reader in long if reader.end]
        assert reasons == [EndReason.LENGTH if large_comes else EndReason.NO_WORKER] * 2
        if large_comes:
            assert all(r.tokens == expected_output(r.prompt, r.max_tokens, set()) for r in long)


def test_the_wait_for_a_larger_worker_begins_anew_when_one_was_there() -> None:
    """If a worker with room came and left, only the time since it left counts."""
    cluster = Cluster(worker_wait_s=WAIT_S, max_num_seqs=4, max_num_batched_tokens=64)
    cluster.join(_worker(b"s/1", num_blocks=4), "small")
    long = _resubmit(cluster, 1, delivered=20)
    cluster.plan()
    _pass(cluster, WAIT_S - 10)
    cluster.join(_worker(b"l/1"), "large")
    cluster.plan()
    cluster.lose(b"l/1")
    cluster.plan()
    _pass(cluster, WAIT_S - 10)
    assert long.end is None
    _pass(cluster, 15)
    assert long.end is not None
    assert long.end.reason is EndReason.NO_WORKER


def test_an_embedding_that_was_accepted_waits_for_a_worker_that_makes_it() -> None:
    """The first worker is of an older version without embeddings, so the request waits for another."""
    cluster = Cluster()
    reader = cluster.submit(1, PROMPT, 1, pooling=Pooling.LAST, again=True, accepted=True)
    old = _join_without_embeddings(cluster, _worker(b"o/1"))
    assert cluster.core.plan(old.peer, cluster.now) == (None, [])
    cluster.handle(ev.TimePassed())
    assert reader.end is None
    cluster.handle(ev.WorkerLost(worker=old.peer, reason="gone"))
    cluster.join(_worker())
    cluster.run()
    assert reader.end is not None
    assert (reader.end.reason, reader.end.embedding) == (
        EndReason.EMBEDDED,
        expected_embedding(PROMPT, Pooling.LAST),
    )


def test_length_and_embedding_are_wanted_of_one_worker() -> None:
    """A request for a long prompt's embedding needs one worker with both the length and the hidden states.

    One worker lacks the length and another the hidden states. A new request is refused; an accepted one waits for a
    worker with both.
    """
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=64)
    cluster.join(_worker(b"s/1", num_blocks=4), "small")
    _join_without_embeddings(cluster, _worker(b"o/1"))
    accepted = cluster.submit(1, [7] * 20, 1, pooling=Pooling.LAST, again=True, accepted=True)
    new = cluster.submit(2, [7] * 20, 1, pooling=Pooling.LAST)
    cluster.run()
    assert accepted.end is None
    assert new.end is not None
    assert new.end.reason is EndReason.INVALID
    cluster.join(_worker(b"l/1"), "large")
    cluster.run()
    assert accepted.end is not None
    assert accepted.end.reason is EndReason.EMBEDDED


def test_a_request_that_no_worker_can_serve_ends_as_any_other() -> None:
    """While it waits for another worker it counts as waiting, takes credit, and is cancelled like any request."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=64, max_queued_requests=2)
    cluster.join(_worker(b"s/1", num_blocks=4), "small")
    first, second = (_resubmit(cluster, stream, delivered=20) for stream in (1, 2))
    cluster.plan()
    assert cluster.core.stats().waiting == 2
    refused = cluster.submit(3, PROMPT, 5)
    assert refused.end is not None
    assert refused.end.reason is EndReason.QUEUE_FULL
    cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=1, credit=400))
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1))
    cluster.handle(ev.FrontendLost(frontend=FRONTEND))
    assert [reader.end.reason for reader in (first, second) if reader.end] == [EndReason.CANCELLED] * 2
    assert cluster.core.stats().waiting == 0
