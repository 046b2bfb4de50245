"""Speculative decoding in the core: rows that advance by several tokens per step, and draft limits."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import EMPTY, extend, token_after
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import IndexArray, Int32Array
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.workers.cost_model import CostModel, StepShape
from scheduler_svc.core.workers.rows import RowTable
from scheduler_svc.core.workers.speculation import TOLERATED_LOSS, Speculation, choose_limits
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.requests import make_request


def expected(prompt: list[int], max_tokens: int, stops: set[int]) -> list[int]:
    """Tokens of a request without speculation."""
    value = EMPTY
    for position, token in enumerate(prompt):
        value = extend(value, token, position)
    tokens: list[int] = []
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in stops):
        tokens.append(token_after(value))
        value = extend(value, tokens[-1], len(prompt) + len(tokens) - 1)
    return tokens


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tokens_are_those_without_speculation(seed: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under memory pressure, with small blocks, stop tokens and short credit, every request gets its exact tokens.

    The draft limits are random, so that all of them occur.
    """
    rng = random.Random(seed)

    def choose(self: Speculation, rows: RowTable, decoding: IndexArray) -> Int32Array:
        return np.array([rng.randint(0, self.max_drafts) for _ in decoding], np.int32)

    monkeypatch.setattr(Speculation, "_choose", choose)
    cluster = Cluster(
        policy=policy,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice((12, 24, 48)),
        prefix_cache=rng.choice(("hash", "radix", "off")),
        max_plans_in_flight=rng.choice((1, 2)),
    )
    cluster.join(
        ModelWorker(
            b"w/1",
            rng.choice((14, 40, 200)),
            rng.choice((2, 4, 8)),
            6,
            num_host_blocks=rng.choice((0, 20)),
            max_draft_tokens=rng.choice((1, 3, 8)),
            rng=random.Random(seed),
        )
    )
    readers = {}
    granted = {}
    for stream in range(12):
        prompt = [stream % 3, *(rng.randrange(50) for _ in range(rng.randrange(1, 9)))]
        stops = {rng.randrange(50) for _ in range(rng.choice((0, 3, 6)))}
        credit = rng.choice((40, 1 << 20))
        granted[stream] = credit
        readers[stream] = cluster.submit(
            stream, prompt, rng.randrange(1, 20), stops=stops, credit=credit, priority=rng.randrange(3)
        )
    for _ in range(3000):
        if not cluster.plan() + cluster.answer():
            short = [stream for stream, reader in readers.items() if reader.end is None]
            if not short:
                break
            for stream in short:
                granted[stream] += 24
                cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=stream, credit=24))
        for stream, reader in readers.items():
            assert len(reader.tokens) <= granted[stream] // 4, "tokens without credit"
    for reader in readers.values():
        assert reader.end is not None
        wanted = expected(reader.prompt, min(reader.max_tokens, cluster.workers[b"w/1"].num_blocks * 8), reader.stops)
        assert reader.tokens == wanted[: len(reader.tokens)]
        assert reader.end.reason in (EndReason.STOP, EndReason.LENGTH)
        assert reader.end.completion_tokens == len(reader.tokens)
        if reader.end.reason is EndReason.STOP:
            assert reader.tokens[-1] in reader.stops
    (worker,) = cluster.core.stats().workers
    assert worker.blocks_held == 0
    assert 0 <= worker.counters.accepted_draft_tokens <= worker.counters.draft_tokens > 0
    # A request's end does not include the steps that were in flight at that time.
    ends = [reader.end for reader in readers.values() if reader.end is not None]
    assert 0 < sum(end.draft_tokens for end in ends) <= worker.counters.draft_tokens
    assert all(0 <= end.accepted_draft_tokens <= end.draft_tokens for end in ends)


def test_a_row_that_advances_faster_than_planned_leaves_before_its_last_answer() -> None:
    """With two plans in flight, a request whose drafts are accepted gets no step beyond its limit."""
    cluster = Cluster(max_num_seqs=1, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w/1", 40, 4, 1, max_tokens_per_step=64, max_draft_tokens=8))
    reader = cluster.submit(1, [1, 2, 3], 60)
    cluster.run()
    assert reader.tokens == expected([1, 2, 3], 60, set())
    steps = len(cluster.plans)
    (worker,) = cluster.core.stats().workers
    assert worker.counters.accepted_draft_tokens > 10
    assert worker.counters.generated_tokens == 60
    assert reader.end is not None
    assert reader.end.draft_tokens == worker.counters.draft_tokens
    assert reader.end.accepted_draft_tokens == worker.counters.accepted_draft_tokens
    assert steps < 60


def test_no_step_computes_a_token_beyond_the_longest_sequence() -> None:
    """A row that may have exceeded the model's length with its drafts in flight waits for the results."""
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=64, max_plans_in_flight=2)
    cluster.join(ModelWorker(b"w/1", 200, 8, 2, max_model_len=40, max_draft_tokens=8))
    for stream in range(8):
        cluster.submit(stream, [stream, 2, 3], 100)
    cluster.run()
    assert all(len(reader.tokens) == 37 for reader in cluster.readers.values())


def _decoding(max_draft_tokens: int = 4) -> tuple[Cluster, ModelWorker]:
    """A cluster with one decoding request, a draft limit, and the result of its last plan."""
    cluster = Cluster(max_num_seqs=1, max_num_batched_tokens=64, max_plans_in_flight=1)
    worker = ModelWorker(b"w/1", 400, 4, 1, max_draft_tokens=max_draft_tokens)
    cluster.join(worker)
    cluster.submit(1, [1, 2, 3], 200)
    for _ in range(40):
        cluster.plan()
        answer = cluster.answers[b"w/1"][0]
        if answer.draft_counts is not None and answer.draft_counts[0] > 1:
            return cluster, worker
        cluster.answer()
    raise AssertionError("no draft was verified")


@pytest.mark.parametrize(
    ("counts", "drafts", "num_tokens"),
    [([0], [1], 0), ([3], [1], 3), ([2], None, 2), ([1, 1], [1, 1], 2), ([1], [5], 1), ([1], [-1], 1), ([2], [2], 1)],
    ids=["no token", "more tokens than drafts", "no drafts", "too long", "over the limit", "negative", "missing token"],
)
def test_an_answer_that_contradicts_the_limits_ends_the_epoch(
    counts: list[int], drafts: list[int] | None, num_tokens: int
) -> None:
    """Token and draft counts that contradict each other or the plan violate the protocol."""
    cluster, _ = _decoding()
    answer = cluster.answers[b"w/1"].popleft()
    wrong = ev.StepDone(
        worker=answer.worker,
        epoch=answer.epoch,
        step=answer.step,
        rows=answer.rows,
        tokens=np.zeros(num_tokens, np.int32),
        counts=np.array(counts, np.int32),
        draft_counts=None if drafts is None else np.array(drafts, np.int32),
    )
    effects = cluster.handle(wrong)
    assert ef.WorkerUnknown(worker=b"w/1") in effects
    assert not any(isinstance(effect, ef.TokensReady) for effect in effects)


def test_a_worker_that_does_not_speculate_gets_no_draft_limits() -> None:
    """Without `max_draft_tokens`, no plan has a draft limit."""
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w/1", 40, 4, 2))
    cluster.submit(1, [1, 2, 3], 30)
    cluster.run()
    assert not any(len(plan.draft_rows) for plan in cluster.plans)


def test_drafts_leave_half_of_the_budget_to_prompts() -> None:
    """While a prompt is computed, drafts take at most half of the tokens that decode rows leave."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=20)
    cluster.join(ModelWorker(b"w/1", 800, 4, 4, max_draft_tokens=8))
    for stream in range(3):
        cluster.submit(stream, [stream, 2, 3], 300)
    for _ in range(60):
        cluster.plan()
        cluster.answer()
    cluster.submit(9, list(range(40)) * 4, 5)
    before = len(cluster.plans)
    while cluster.readers[9].end is None:
        cluster.plan()
        cluster.answer()
    chunks = [int(plan.chunk_lengths[0]) for plan in cluster.plans[before:] if len(plan.chunk_rows)]
    assert min(chunks[1:-1]) >= 8


# ---------------------------------------------------------------- rows


def test_rows_keep_every_token_however_many_a_step_adds() -> None:
    """Rows that get up to nine tokens per step lose none of them."""
    chance = random.Random(1)
    rows = RowTable(3, 4, 20000)
    wanted: dict[int, list[int]] = {}
    for _ in range(3):
        request = make_request(prompt=2, limit=1 << 20)
        row = rows.occupy(
            request, limit=request.limit, frontend_index=0, blocks=np.arange(1), num_computed=0, num_shared=0, rank=0.0
        )
        wanted[row] = []
    for _ in range(1500):
        taking_part = sorted(chance.sample(range(3), chance.randint(1, 3)))
        counts = [chance.randint(1, 9) for _ in taking_part]
        tokens = [[chance.randrange(1000) for _ in range(count)] for count in counts]
        flat = np.array([token for part in tokens for token in part], np.int32)
        first = rows.commit(np.array(taking_part, np.intp), flat, np.array(counts, np.int32))
        assert first.tolist() == [len(wanted[row]) for row in taking_part]
        for row, part in zip(taking_part, tokens, strict=True):
            wanted[row] += part
    for row, tokens_of_row in wanted.items():
        request, _ = rows.vacate(row)
        assert request.tokens.tolist()[2:] == tokens_of_row


# ---------------------------------------------------------------- limits


def _rate(acceptance: list[float], limits: list[int], base_s: float, fixed_s: float, draft_s: float) -> float:
    """Expected tokens per second."""
    tokens = sum(1 + sum(a**j for j in range(1, limit + 1)) for a, limit in zip(acceptance, limits, strict=True))
    return tokens / (base_s + (fixed_s if any(limits) else 0.0) + draft_s * sum(limits))


@pytest.mark.parametrize("seed", range(30))
def test_limits_never_promise_less_than_no_drafts_or_one_limit_for_all(seed: int) -> None:
    """The limits' expected rate is at least that of any common limit, and nearly at least that without drafts."""
    rng = random.Random(seed)
    acceptance = [rng.random() for _ in range(rng.choice((1, 3, 40)))]
    base_s = rng.uniform(0.001, 0.1)
    fixed_s = base_s * rng.choice((0.0, 0.0, 0.2, 1.0))
    draft_s = base_s / len(acceptance) * rng.choice((0.0, 0.05, 0.3, 1.0, 3.0))
    limits = choose_limits(np.array(acceptance), base_s, fixed_s, draft_s, 8).tolist()
    rate, plain = _rate(acceptance, limits, base_s, fixed_s, draft_s), len(acceptance) / base_s
    assert rate >= plain
    for common in (1, 2, 4, 8):
        other = _rate(acceptance, [common] * len(acceptance), base_s, fixed_s, draft_s)
        assert rate >= min(other, 1.03 * plain) * 0.97


def test_free_drafts_get_large_limits_and_costly_ones_none() -> None:
    """Limits are large if drafts cost nothing and are accepted at all, and 0 if a draft costs as much as a token."""
    acceptance = np.array([0.9, 0.65, 0.05])
    assert choose_limits(acceptance, 0.01, 0.0, 0.0, 5).tolist() == [5, 5, 0]
    assert choose_limits(acceptance, 0.01, 0.0, 0.01 / 3, 5).tolist() == [0, 0, 0]


def test_a_row_with_low_acceptance_gets_fewer_drafts() -> None:
    """Limits fall with the acceptance of the row, and are 0 where drafts are nearly always rejected."""
    limits = choose_limits(np.array([0.95, 0.6, 0.02]), 0.01, 0.0, 0.0005, 8).tolist()
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == 8
    assert limits[2] == 0


def test_the_work_of_a_step_with_drafts_counts_once() -> None:
    """If the first draft takes as long as the step, one doubtful draft does not pay, but many that are accepted do."""
    assert choose_limits(np.array([0.4]), 0.001, 0.001, 0.00001, 8).tolist() == [0]
    assert choose_limits(np.array([0.9]), 0.001, 0.001, 0.00001, 8).tolist() == [8]


@dataclass(frozen=True)
class _Machine:
    """Times of a simulated worker, relative to the time of a step without drafts."""

    draft: float
    """Time per draft, relative to the time per row of a step without drafts."""
    fixed: float = 0.0
    """Time that the first draft of a step adds."""
    searching: float = 0.0
    """Time that a step with limits takes longer, with drafts or without."""
    proposed: float = 1.0
    """Probability that a row with a limit has drafts."""


def _played(num_rows: int, machine: _Machine, acceptance: list[float], steps: int, seed: int) -> tuple[float, float]:
    """Return (time without drafts, time with drafts) of the tokens of all steps, in steps without drafts.

    Steps vary: a few take five times as long.
    """
    chance = random.Random(seed)
    costs = CostModel()
    rows, speculation = RowTable(num_rows, 16, 400), Speculation(8, costs)
    for _ in range(num_rows):
        request = make_request(prompt=2, limit=1 << 20)
        rows.start_decoding(
            rows.occupy(
                request,
                limit=request.limit,
                frontend_index=0,
                blocks=np.arange(1),
                num_computed=0,
                num_shared=0,
                rank=0.0,
            )
        )
    decoding, base_s, plain_s, spent_s = rows.decoding, 0.02, 0.0, 0.0
    for _ in range(steps):
        limits = speculation.limits(rows, decoding)
        if limits is not None:
            rows.set_draft_limits(decoding, limits)
        drafts = rows.draft_limit[decoding].copy()
        allowed = bool(drafts.any())
        accepted = np.zeros(num_rows, np.int32)
        for row, limit in enumerate(drafts.tolist()):
            if chance.random() >= machine.proposed:
                drafts[row] = 0
                continue
            while accepted[row] < limit and chance.random() < acceptance[row % len(acceptance)]:
                accepted[row] += 1
        num_drafts, num_tokens = int(drafts.sum()), num_rows + int(accepted.sum())
        added = machine.searching * allowed + machine.fixed * (num_drafts > 0) + machine.draft / num_rows * num_drafts
        disturbance = 5.0 if chance.random() < 0.01 else 1 + 0.1 * abs(chance.gauss(0, 1))
        rows.verified(decoding, drafts, accepted)
        duration = base_s * (1 + added) * disturbance
        shape = StepShape(num_rows, 0, 3 * num_rows, num_drafts)
        speculation.measured(shape, num_tokens, duration, allowed=allowed)
        costs.measured(shape, duration, drafts_allowed=allowed)
        plain_s += disturbance * num_tokens / num_rows
        spent_s += disturbance * (1 + added)
    return plain_s, spent_s


MACHINES = [
    *(_Machine(draft) for draft in (0.02, 0.2, 1.0, 1.5)),
    _Machine(0.02, fixed=0.5),
    _Machine(0.05, fixed=2.0, proposed=0.3),
    _Machine(0.02, fixed=0.3, searching=0.05, proposed=0.05),
]


@pytest.mark.parametrize("num_rows", [1, 4, 32])
@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("acceptance", [[0.0], [0.3], [0.9], [0.9, 0.1, 0.5, 0.0]], ids=["0", "0.3", "0.9", "mixed"])
def test_drafts_lose_no_more_than_the_stated_bound(num_rows: int, machine: _Machine, acceptance: list[float]) -> None:
    """With measuring and trying again, drafts lose at most 1 percent of the time, and some steps in the beginning.

    Half a percent is left to errors of the measured times.
    """
    steps = 1500
    plain, spent = _played(num_rows, machine, acceptance, steps, seed=num_rows)
    worst = machine.searching + machine.fixed + machine.draft * 8
    assert spent - plain <= (TOLERATED_LOSS + 0.005) * steps + 4 + worst


def test_drafts_gain_where_they_are_cheap_and_accepted() -> None:
    """Cheap drafts that are accepted give several times the tokens per second, also beside rows that gain nothing."""

    def speedup(num_rows: int, machine: _Machine, acceptance: list[float]) -> float:
        plain, spent = _played(num_rows, machine, acceptance, 800, seed=1)
        return plain / spent

    assert speedup(1, _Machine(0.02), [0.9]) > 4
    assert speedup(1, _Machine(0.2), [0.9]) > 2
    assert speedup(1, _Machine(0.02, fixed=0.7), [0.9]) > 2.5
    assert speedup(32, _Machine(0.2), [0.9, 0.1, 0.5, 0.0]) > 1.4
    assert speedup(32, _Machine(0.2, fixed=0.2, proposed=0.5), [0.9]) > 1.2


@pytest.mark.parametrize("max_tokens", [2, 3, 6])
def test_a_row_verifies_no_draft_beyond_its_limit(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step yields a token without a draft, so a row needs one draft fewer than its remaining tokens."""
    monkeypatch.setattr(
        Speculation, "limits", lambda _, rows, decoding: np.full(len(decoding), 8, np.int32)
    )  # As many drafts as the worker verifies.
    cluster = Cluster(max_num_seqs=1, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w1", num_blocks=64, block_size=16, max_rows=1, max_draft_tokens=8))
    cluster.submit(1, [1] * 8, max_tokens)
    cluster.run()
    worker = cluster.core.worker(b"w1")
    assert worker is not None
    limits = [int(limit) for plan in cluster.plans for limit in plan.draft_limits]
    assert max(limits, default=0) == max_tokens - 2
