"""Cost of a step in the scheduler: the real core and codecs, without sockets, with synthetic results.

The benchmark measures thread CPU time per step, so that other work on the machine has little effect. *Commit* handles a
result and the arrivals, encodes the front ends' frames and cleans up. *Plan* makes and encodes the next plan. The order
is that of the service: plan, clean-up, front ends' frames. *Answer to plan* is the time that a worker waits: all work
before the plan's frame is sent. Settings: defaults, prefix cache on, tracing at 1 % if the environment enables it,
staggered row lengths, prompts of 2,048 tokens with block keys as computed by the front end.

Scenarios: `steady` (all rows decode), `churn` (8 requests end and 8 arrive in every step), `queued` (as churn, with
100,000 requests waiting, per policy), `tenants` (as queued, with one request of each of 10,000 tenants, under `fair`),
`burst` (2,000 requests arrive at 64 idle workers, repeatedly, under `fcfs` and under the default policy; a step is that
of one worker). `admission` is the cost of queueing a request; `admit` is the cost of giving one a row: the time of a
plan, divided by the requests it admits.
"""

import dataclasses
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import POLICIES, CoreConfig
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.frontend import link as frontend_link
from scheduler_svc.frontend.link import Outgoing
from scheduler_svc.tracing import SchedulerTracing
from scheduler_svc.worker import link as worker_link
from shared.columns import to_column
from shared.prefix_keys import following_keys, root_key
from shared.telemetry import Telemetry

PROMPT_TOKENS = 2048
BLOCK_SIZE = 16
QUEUED_PROMPT_TOKENS = 128
"""Prompt length of waiting requests; short, so that 100,000 requests fit into memory."""
CHURN = 8
NUM_TENANTS = 50
MANY_TENANTS = 10_000
_COMPARED = ("balanced", "slo")
"""Policies that are also measured without waiting requests, to compare them with `fcfs`."""
_FEW = 100
"""Number of waiting requests in the comparison run, which shows whether a longer queue costs more."""
BURST_WORKERS = 64
BURST_REQUESTS = 2_000
BURST_ROWS = 32
"""Rows of each worker: 2,048 in total, so that nearly all are in use after a burst."""
BURST_PROMPT_TOKENS = 64
BURST_MAX_TOKENS = 3
TRACED_SHARE = 0.01
STEP_S = 0.02
VOCAB = 32_000
_FRONTEND = b"frontend/1"
_TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True, slots=True)
class CoreResult:
    """Microseconds per step. `admission` and `admit` are per request."""

    scenario: str
    rows: int
    queued: int
    policy: str
    plan_us_p50: float
    commit_us_p50: float
    total_us_p50: float
    total_us_p99: float
    admission_us_p50: float
    workers: int
    tenants: int
    answer_to_plan_us_p50: float
    """Time from a received result to the encoded next plan, without the front ends' frames."""
    admit_us_p50: float
    """CPU time to plan, per admitted request."""
    admit_us_p99: float
    longest_plan_us: float


@dataclass(frozen=True, slots=True)
class _Turn:
    """Durations in one turn of the loop, in nanoseconds."""

    commit: int
    answer_to_plan: int
    plans: list[tuple[int, int]]
    """For each plan: (nanoseconds, number of admitted requests)."""

    @property
    def plan(self) -> int:
        return sum(spent for spent, _ in self.plans)


class _Worker:
    """Worker that responds to plans with synthetic tokens for the rows in decode."""

    def __init__(self, max_rows: int) -> None:
        self._decodes = np.zeros(max_rows, np.bool_)
        self._left = np.zeros(max_rows, np.int32)
        self._rng = np.random.default_rng(0)

    def answer(self, plan: Plan) -> bytes:
        self._decodes[plan.leaves] = False
        for admission in plan.admissions:
            self._left[admission.row] = len(admission.token_ids) - admission.num_computed_tokens
        self._left[plan.chunk_rows] -= plan.chunk_lengths
        self._decodes[plan.chunk_rows[self._left[plan.chunk_rows] == 0]] = True
        rows = np.flatnonzero(self._decodes).astype(np.int32)
        result = plan_pb2.StepResult(
            step=plan.step,
            rows=to_column(rows),
            tokens=to_column(self._rng.integers(3, VOCAB, len(rows))),
            timings=plan_pb2.StepTimings(received_unix_ns=1, started_unix_ns=1, forward_ns=1, num_tokens=len(rows)),
        )
        return plan_pb2.WorkerMessage(epoch=plan.epoch, result=result).SerializeToString()


class Bench:
    """One core, and workers with `rows` rows each."""

    def __init__(
        self,
        rows: int,
        policy: str,
        telemetry: Telemetry,
        *,
        workers: int = 1,
        tenants: int = NUM_TENANTS,
        make_core: Callable[[CoreConfig, int], Scheduler] = Scheduler,
    ) -> None:
        config = CoreConfig(
            policy=policy,
            max_num_seqs=rows,
            # Without a budget limit all rows start in one step, so as many requests end per step as arrive in the churn
            # case.
            max_num_batched_tokens=1 << 20,
            max_queued_requests=1 << 20,
            max_queued_tokens=1 << 40,
        )
        self.tenants = tenants
        self._core = make_core(config, 1 << 40)
        self._tracing = SchedulerTracing(telemetry, 0)
        self._workers = {b"worker/%d" % number: _Worker(rows) for number in range(workers)}
        self._answers: deque[tuple[bytes, bytes]] = deque()
        """(worker, result) of the steps in flight, oldest first."""
        self._tidying = 0
        """Durations of the clean-up after recent plans, in nanoseconds."""
        self._now = 1.0
        self._stream = 0
        self._random = random.Random(0)
        self._rng = np.random.default_rng(1)
        self._core.handle(ev.FrontendJoined(frontend=_FRONTEND), self._now)
        blocks = rows * (2 * PROMPT_TOKENS // BLOCK_SIZE) + 10_000
        model = ev.ModelFacts(
            name="m", architecture="x", fingerprint="f", max_model_len=1 << 17, vocab_size=VOCAB, dtype="bfloat16",
            eos_token_ids=(2,),
        )  # fmt: skip
        for peer in self._workers:
            self._core.handle(
                ev.WorkerHello(
                    worker=peer, worker_id=peer.decode(), model=model, block_size=BLOCK_SIZE, num_blocks=blocks,
                    max_rows=rows, max_tokens_per_step=1 << 20,
                ),
                self._now,
            )  # fmt: skip

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight."""
        return not self._answers

    def submission(self, max_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> bytes:
        """Return a front end's frame with one request."""
        self._stream += 1
        tokens = self._rng.integers(3, VOCAB, prompt_tokens - self._stream % BLOCK_SIZE).astype("<i4").tobytes()
        submission = link_pb2.Submission(
            stream=self._stream,
            request_id=f"req-{self._stream:024d}",
            token_ids=tokens,
            num_prompt_tokens=len(tokens) // 4,
            max_tokens=max_tokens,
            stop_token_ids=to_column([2]),
            sampling=plan_pb2.SamplingParams(temperature=0.7, top_p=0.9, seed=7).SerializeToString(),
            credit=1 << 30,
            tenant=f"tenant-{self._stream % self.tenants}",
            priority=self._stream % 5,
            traceparent=_TRACEPARENT if self._random.random() < TRACED_SHARE else "",
            block_keys=following_keys(root_key("f", b""), tokens, BLOCK_SIZE),
            block_size=BLOCK_SIZE,
        )
        return link_pb2.FrontendMessage(submissions=[submission]).SerializeToString()

    def submit(self, frame: bytes, outgoing: Outgoing) -> float:
        """Handle a front end's frame; return the time in microseconds."""
        begin = time.thread_time_ns()
        for event in frontend_link.decode(_FRONTEND, frame, self._now).events:
            self._carry_out(self._core.handle(event, self._now), outgoing)
        return (time.thread_time_ns() - begin) / 1e3

    def steps(self, count: int, arrivals: Iterator[list[bytes]]) -> Iterator[_Turn]:
        """Run steps of a single worker with two plans in flight."""
        self._plan(list(self._workers), Outgoing())
        for _ in range(count):
            self._now += STEP_S
            yield self.turn(next(arrivals), list(self._workers))

    def burst_turn(self) -> _Turn:
        """Handle one worker's result, if a step is in flight, and plan for all workers whose plan is due."""
        self._now += STEP_S / len(self._workers)
        return self.turn([], None)

    def turn(self, frames: list[bytes], peers: list[bytes] | None) -> _Turn:
        """Run one turn of the service's loop; plan for `peers`, or for the workers whose plan is due."""
        answer = self._answers.popleft() if self._answers else None
        outgoing = Outgoing()
        begin = time.thread_time_ns()
        if answer is not None:
            event, _ = worker_link.decode(*answer)
            self._carry_out(self._core.handle(event, self._now), outgoing)
        for frame in frames:
            self.submit(frame, outgoing)
        if peers is None:
            peers = self._core.due_workers(self._now + STEP_S)
        committed = time.thread_time_ns()
        plans = self._plan(peers, outgoing)
        planned = time.thread_time_ns()
        outgoing.encode(1 << 40)
        commit = committed - begin + self._tidying + time.thread_time_ns() - planned
        answer_to_plan = committed - begin + sum(spent for spent, _ in plans)
        return _Turn(commit=commit, answer_to_plan=answer_to_plan, plans=plans)

    def _plan(self, peers: list[bytes], outgoing: Outgoing) -> list[tuple[int, int]]:
        """Make all plans for these workers; return each plan's duration in nanoseconds and number of admissions."""
        timings = []
        self._tidying = 0
        for peer in peers:
            begin = time.thread_time_ns()
            while True:
                plan, effects = self._core.plan(peer, self._now + STEP_S)
                self._carry_out(effects, outgoing)
                if plan is None:
                    break
                step, attempts = self._tracing.plan_issued(plan, peer.decode(), self._now)
                worker_link.encode_plan(plan, step_traceparent=step, attempt_traceparents=attempts)
                timings.append((time.thread_time_ns() - begin, len(plan.admissions)))
                begin = time.thread_time_ns()
                self._core.tidy()
                self._tidying += time.thread_time_ns() - begin
                self._answers.append((peer, self._workers[peer].answer(plan)))
                begin = time.thread_time_ns()
            timings.append((time.thread_time_ns() - begin, 0))
        return timings

    def _carry_out(self, effects: list[ef.Effect], outgoing: Outgoing) -> None:
        for effect in effects:
            match effect:
                case ef.TokensReady():
                    outgoing.add_tokens(effect)
                case ef.RequestEnded():
                    outgoing.add_end(effect)
                case ef.AttemptEnded():
                    self._tracing.attempt_ended((effect.frontend, effect.stream), effect.outcome, self._now)
                case ef.AttemptPrefilled():
                    self._tracing.attempt_prefilled((effect.frontend, effect.stream), self._now)


def bench_steady(rows: int, steps: int, telemetry: Telemetry, *, policy: str = "fcfs") -> CoreResult:
    """Measure steps in which all rows decode; no request arrives or ends."""
    bench = Bench(rows, policy, telemetry)
    for _ in range(rows):
        bench.submit(bench.submission(max_tokens=1 << 16), Outgoing())
    turns = list(bench.steps(rows // 4 + 200 + steps, _arrivals(bench, rows, 0)))[-steps:]
    return _result("steady", rows, 0, policy, turns)


def bench_churn(
    rows: int, steps: int, telemetry: Telemetry, *, policy: str = "fcfs", queued: int = 0, tenants: int = NUM_TENANTS
) -> CoreResult:
    """Measure steps in which `CHURN` requests end and arrive, with `queued` more waiting all the time."""
    bench = Bench(rows, policy, telemetry, tenants=tenants)
    lifetime = max(2, rows // CHURN)
    admission: list[float] = []
    if queued:
        # The lengths differ, so that the requests end at different times.
        distinct = [bench.submission(2 + index * lifetime // 32, QUEUED_PROMPT_TOKENS) for index in range(64)]
        for index in range(queued):
            frame = link_pb2.FrontendMessage.FromString(distinct[index % 64])
            frame.submissions[0].stream = 1_000_000 + index
            frame.submissions[0].tenant = f"tenant-{index % tenants}"
            frame.submissions[0].priority = index % 5
            admission.append(bench.submit(frame.SerializeToString(), Outgoing()))
    else:
        for index in range(rows):
            bench.submit(bench.submission(max_tokens=2 + index % lifetime), Outgoing())
    turns = list(bench.steps(4 * lifetime + 100 + steps, _arrivals(bench, rows, CHURN)))[-steps:]
    scenario = "churn" if not queued else "queued" if tenants == NUM_TENANTS else "tenants"
    return _result(scenario, rows, queued, policy, turns, admission, tenants=tenants)


def bench_burst(
    bursts: int,
    telemetry: Telemetry,
    *,
    policy: str = "fcfs",
    workers: int = BURST_WORKERS,
    requests: int = BURST_REQUESTS,
) -> CoreResult:
    """Measure bursts of `requests` requests that arrive at idle workers, until all requests have ended."""
    bench = Bench(BURST_ROWS, policy, telemetry, workers=workers)
    admission: list[float] = []
    turns: list[_Turn] = []
    for burst in range(1 + bursts):
        frames = [bench.submission(BURST_MAX_TOKENS, BURST_PROMPT_TOKENS) for _ in range(requests)]
        queueing = [bench.submit(frame, Outgoing()) for frame in frames]
        found = [bench.burst_turn()]
        while not bench.is_idle:
            found.append(bench.burst_turn())
        if burst:  # The first burst warms the caches and is not counted.
            admission += queueing
            turns += found
    return _result("burst", BURST_ROWS, requests, policy, turns, admission, workers=workers)


def _arrivals(bench: Bench, rows: int, count: int) -> Iterator[list[bytes]]:
    """Yield the frames that arrive in each step."""
    while True:
        yield [bench.submission(max(2, rows // CHURN)) for _ in range(count)]


def _result(
    scenario: str,
    rows: int,
    queued: int,
    policy: str,
    turns: list[_Turn],
    admission: Sequence[float] = (),
    *,
    workers: int = 1,
    tenants: int = NUM_TENANTS,
) -> CoreResult:
    commits = np.array([turn.commit for turn in turns]) / 1e3
    plans = np.array([turn.plan for turn in turns]) / 1e3
    totals = commits + plans
    admits = [spent / number / 1e3 for turn in turns for spent, number in turn.plans for _ in range(number)]
    return CoreResult(
        scenario=scenario,
        rows=rows,
        queued=queued,
        policy=policy,
        plan_us_p50=_percentile(plans, 50),
        commit_us_p50=_percentile(commits, 50),
        total_us_p50=_percentile(totals, 50),
        total_us_p99=_percentile(totals, 99),
        admission_us_p50=_percentile(admission, 50),
        workers=workers,
        tenants=tenants,
        answer_to_plan_us_p50=_percentile([turn.answer_to_plan / 1e3 for turn in turns], 50),
        admit_us_p50=_percentile(admits, 50),
        admit_us_p99=_percentile(admits, 99),
        longest_plan_us=round(max(spent for turn in turns for spent, _ in turn.plans) / 1e3, 1),
    )


def _percentile(values: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]], share: int) -> float:
    return round(float(np.percentile(values, share)), 1) if len(values) else 0.0


def as_json(results: list[CoreResult]) -> dict[str, list[dict[str, object]]]:
    """Return the results in the format of `quire bench scheduler --json`."""
    return {"results": [asdict(result) for result in results]}


def run_all(steps: int, queued: int) -> list[CoreResult]:
    """Run every scenario once."""
    telemetry = Telemetry("quire-bench")
    results = [bench_steady(rows, steps, telemetry) for rows in (16, 256, 1024, 4096)]
    results += [bench_steady(256, steps, telemetry, policy=policy) for policy in _COMPARED]
    results += [bench_churn(256, steps, telemetry, policy=policy) for policy in ("fcfs", *_COMPARED)]
    results.append(bench_churn(256, steps // 4, telemetry, policy=_COMPARED[0], queued=min(queued, _FEW)))
    results += [bench_churn(256, steps // 4, telemetry, policy=policy, queued=queued) for policy in POLICIES]
    many = min(queued, MANY_TENANTS)
    results.append(bench_churn(256, steps // 4, telemetry, policy="fair", queued=many, tenants=many))
    results += [bench_burst(max(1, steps // 80), telemetry, policy=policy) for policy in ("fcfs", "balanced")]
    return results


def median_of(repeated: Sequence[CoreResult]) -> CoreResult:
    """Return each number's median over repeated runs of one scenario."""
    figures = [field.name for field in dataclasses.fields(CoreResult) if "_us" in field.name]
    medians = {name: round(statistics.median(getattr(each, name) for each in repeated), 1) for name in figures}
    return dataclasses.replace(repeated[0], **medians)
