"""KV that workers retain when their scheduler is lost: the next scheduler does not compute it again."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.queueing.backlog import MAX_ASSIGNED_S
from shared.columns import to_column
from shared.prefix_keys import root_key
from tests.scheduler_svc.cluster import Cluster

BLOCK = 4
SALTS = (b"", b"one", b"two")


@dataclass(slots=True)
class RetainingWorker(ModelWorker):
    """A worker whose blocks keep their content when its session is lost."""

    retained: tuple[ev.RetainedSequence, ...] = ()

    def lose_session(self, salts: dict[int, bytes]) -> None:
        """Note what the rows have in their blocks."""
        self.retained = tuple(
            ev.RetainedSequence(
                root=root_key(self.fingerprint, salts[row.name.stream]),
                tokens=to_column(row.tokens[: row.computed]),
                blocks=np.array(row.blocks[: -(-row.computed // self.block_size)], np.intp),
                is_proven=len(row.tokens) > row.num_admitted,
            )
            for row in self.rows.values()
            if 0 < row.computed < len(row.tokens) + 1
        )

    def hello(self, worker_id: str = "w", reason: ev.HelloReason = ev.HelloReason.STARTED) -> ev.WorkerHello:
        """Say hello with the retained sequences."""
        return replace(ModelWorker.hello(self, worker_id, reason), retained=self.retained)

    def welcome(self, epoch: int) -> None:
        """Keep the content of the blocks."""
        before = self._values
        ModelWorker.welcome(self, epoch)
        if before:
            self._values = before


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "off"])
@pytest.mark.parametrize("seed", range(6))
def test_the_next_scheduler_computes_at_most_a_block_of_each_request_again(seed: int, prefix_cache: str) -> None:
    """Each request ends with the model's tokens, and hardly any of its tokens are computed a second time.

    Some requests share prefixes, and each scope has its own.
    """
    rng = random.Random(seed)
    first = Cluster(prefix_cache=prefix_cache, max_num_batched_tokens=64)
    workers = {f"w{number}": RetainingWorker(b"%d" % number, 200, BLOCK, 8) for number in range(2)}
    for worker_id, worker in workers.items():
        first.join(worker, worker_id)
    common = [rng.randrange(900) for _ in range(13)]
    prompts = {
        stream: common[: rng.randrange(14)] + [rng.randrange(900) for _ in range(rng.randrange(1, 20))]
        for stream in range(12)
    }
    salts = {stream: rng.choice(SALTS) for stream in prompts}
    for stream, prompt in prompts.items():
        first.submit(stream, prompt, 30, salt=salts[stream])
    for _ in range(rng.randrange(6, 20)):
        first.plan()
        first.answer()
    running = {
        row.name.stream: row.computed
        for worker in workers.values()
        for row in worker.rows.values()
        if first.readers[row.name.stream].tokens
    }
    for worker in workers.values():
        worker.lose_session(salts)

    second = Cluster(prefix_cache=prefix_cache, max_num_batched_tokens=64)
    for worker_id, worker in workers.items():
        second.join(worker, worker_id, ev.HelloReason.SESSION_LOST)
    for stream, reader in first.readers.items():
        delivered = tuple(reader.tokens)
        second.submit(stream, prompts[stream], 30, salt=salts[stream], delivered=delivered, accepted=True)
    second.run()

    for stream, reader in second.readers.items():
        assert reader.tokens == expected_output(prompts[stream], 30, set())
    cached = sum(stats.counters.cached_tokens for stats in second.core.stats().workers)
    if prefix_cache == "off":
        assert cached == 0
    else:
        # In the worst case, tokens of the last result were lost with the scheduler.
        assert cached >= sum(max(0, computed - 2 * BLOCK) for computed in running.values())


@pytest.mark.parametrize("budget", [64, 16])
def test_requests_return_to_the_workers_with_their_kv_in_whatever_order_plans_are_made(budget: int) -> None:
    """Some workers are planned long after others. Meanwhile, nothing is computed elsewhere.

    With a budget of 16 tokens, a plan cannot admit all requests of its worker.
    """
    first = Cluster(max_num_seqs=16, max_num_batched_tokens=1024)
    workers = {f"w{number}": RetainingWorker(b"%d" % number, 400, BLOCK, 16) for number in range(6)}
    for worker_id, worker in workers.items():
        first.join(worker, worker_id)
    prompts = {stream: [stream * 20 + place for place in range(17)] for stream in range(48)}
    for stream, prompt in prompts.items():
        first.submit(stream, prompt, 30)
    for _ in range(8):
        first.plan()
        first.answer()
    homes = {row.name.stream: worker.peer for worker in workers.values() for row in worker.rows.values()}
    for worker in workers.values():
        worker.lose_session(dict.fromkeys(prompts, b""))

    second = Cluster(max_num_seqs=16, max_num_batched_tokens=budget, max_plans_in_flight=1)
    for worker_id, worker in workers.items():
        second.join(worker, worker_id, ev.HelloReason.SESSION_LOST)
    for stream, reader in first.readers.items():
        second.submit(stream, prompts[stream], 30, delivered=tuple(reader.tokens), accepted=True)
    for peer in second.core.workers():
        second.plan_for(peer)
        second.now += MAX_ASSIGNED_S
        second.handle(ev.TimePassed())
    for _ in range(4):
        second.answer()
        second.plan()

    found = {row.name.stream: worker.peer for worker in workers.values() for row in worker.rows.values()}
    assert found == {stream: homes[stream] for stream in found}
    assert len(found) == len(homes)
    second.run()
    for stream, reader in second.readers.items():
        assert reader.tokens == expected_output(prompts[stream], 30, set())


def test_sequences_that_contradict_each_other_are_not_used() -> None:
    """A block cannot have two contents, and blocks beyond the limit of the scheduler are not used."""
    cluster = Cluster(max_tokens_in_paged_kv_cache=40)
    worker = RetainingWorker(b"w", 200, BLOCK, 8)
    tokens = to_column(list(range(8)))
    root = root_key("f", b"")

    def sequence(values: bytes, blocks: list[int]) -> ev.RetainedSequence:
        return ev.RetainedSequence(root=root, tokens=values, blocks=np.array(blocks, np.intp), is_proven=True)

    worker.retained = (
        sequence(tokens, [0, 1]),
        sequence(to_column(list(range(8, 16))), [1, 2]),
        sequence(to_column(list(range(20, 28))), [3, 3]),
        sequence(to_column(list(range(30, 38))), [3, 150]),
    )
    cluster.join(worker)
    joined = cluster.core.worker(b"w")
    assert joined is not None
    assert np.flatnonzero(joined.pool.cache.holds).tolist() == [0, 1]
    assert joined.pool.num_cached == 2


def test_the_first_plan_of_each_worker_continues_all_requests_whose_kv_it_has() -> None:
    """The limit of 128 tokens before the first measurement does not apply to the last blocks of these requests."""
    settings = {"max_num_seqs": 80, "max_num_batched_tokens": 4096, "itl_target_s": 0.5}
    first = Cluster(**settings)
    workers = {
        f"w{number}": RetainingWorker(b"%d" % number, 4000, BLOCK, 80, max_tokens_per_step=1024) for number in range(2)
    }
    for worker_id, worker in workers.items():
        first.join(worker, worker_id)
    prompts = {stream: [stream * 5 + place for place in range(18)] for stream in range(160)}
    for stream, prompt in prompts.items():
        first.submit(stream, prompt, 100)
    for _ in range(60):
        first.plan()
        first.answer()
    assert all(reader.tokens for reader in first.readers.values())
    for worker in workers.values():
        worker.lose_session(dict.fromkeys(prompts, b""))

    second = Cluster(**settings)
    for worker_id, worker in workers.items():
        second.join(worker, worker_id, ev.HelloReason.SESSION_LOST)
    for stream, reader in first.readers.items():
        second.submit(stream, prompts[stream], 100, delivered=tuple(reader.tokens), accepted=True)
    second.plan()

    assert [len(worker.rows) for worker in workers.values()] == [80, 80]
