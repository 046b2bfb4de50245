"""Embedding requests in the core: their rows leave once the prompt is planned, and they end with their vector."""

import dataclasses

import numpy as np

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_embedding
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import EndReason
from shared.request_spec import Pooling
from tests.scheduler_svc.cluster import FRONTEND, Cluster, Reader
from tests.scheduler_svc.requests import make_arrival

PROMPT = list(range(1, 30))


class OldWorker(ModelWorker):
    """One that speaks the version before embeddings."""

    def hello(self, worker_id: str = "w", reason: ev.HelloReason = ev.HelloReason.STARTED) -> ev.WorkerHello:
        """Says nothing of hidden states."""
        hello = super().hello(worker_id, reason)
        return dataclasses.replace(hello, model=dataclasses.replace(hello.model, hidden_size=0))


def embed(cluster: Cluster, stream: int, pooling: Pooling) -> Reader:
    """Submits a request."""
    reader = cluster.readers[stream] = Reader(PROMPT, 1, set())
    cluster.handle(
        make_arrival(
            FRONTEND,
            stream,
            tokens=len(PROMPT),
            token_ids=np.array(PROMPT, np.int32),
            max_tokens=1,
            credit=4,
            pooling=pooling,
        )
    )
    return reader


def ended(reader: Reader) -> tuple[EndReason, bytes]:
    """How a request ended."""
    assert reader.end is not None
    assert not reader.tokens
    return reader.end.reason, reader.end.embedding


def test_a_mean_begins_at_the_first_token_whatever_is_cached() -> None:
    """The last token's hidden state reads the prefix cache; a mean computes all, in chunks; both end once, rightly."""
    cluster = Cluster(max_num_batched_tokens=8, max_num_seqs=4)
    cluster.join(ModelWorker(b"w/1", num_blocks=64, block_size=4, max_rows=4))
    for stream, pooling in enumerate((Pooling.LAST, Pooling.MEAN, Pooling.LAST), 1):
        reader = embed(cluster, stream, pooling)
        cluster.run()
        assert ended(reader) == (EndReason.EMBEDDED, expected_embedding(PROMPT, pooling))
    computed = [a.num_computed_tokens for plan in cluster.plans for a in plan.admissions]
    assert computed == [0, 0, 28]


def test_workers_of_an_older_version_are_left_out() -> None:
    """An embedding waits for a worker that supports it; without such a worker, it is refused."""
    cluster = Cluster(max_num_batched_tokens=8, max_num_seqs=4)
    cluster.join(OldWorker(b"old/1", num_blocks=64, block_size=4, max_rows=4), "old")
    refused = embed(cluster, 1, Pooling.LAST)
    cluster.run()
    assert ended(refused)[0] is EndReason.INVALID

    cluster.join(ModelWorker(b"new/1", num_blocks=64, block_size=4, max_rows=4), "new")
    served = embed(cluster, 2, Pooling.LAST)
    cluster.run()
    assert ended(served) == (EndReason.EMBEDDED, expected_embedding(PROMPT, Pooling.LAST))
    assert {plan.worker for plan in cluster.plans if plan.admissions} == {b"new/1"}


def test_an_answer_without_its_vector_ends_the_epoch() -> None:
    """A worker that omits a vector, or returns one of another size, is declared lost; the request is planned again."""
    for wrong in ((), (ev.RowEmbedding(row=3, generation=1, values=b"123"),)):
        cluster = Cluster(max_num_batched_tokens=64, max_num_seqs=4)
        worker = ModelWorker(b"w/1", num_blocks=64, block_size=4, max_rows=4)
        cluster.join(worker)
        reader = embed(cluster, 1, Pooling.LAST)
        plan, _ = cluster.core.plan(worker.peer, cluster.now)
        assert plan is not None
        cluster.handle(dataclasses.replace(worker.execute(plan), embeddings=wrong))
        assert not cluster.core.workers()
        assert reader.end is None

        cluster.join(ModelWorker(b"w/2", num_blocks=64, block_size=4, max_rows=4))
        cluster.run()
        assert ended(reader) == (EndReason.EMBEDDED, expected_embedding(PROMPT, Pooling.LAST))
