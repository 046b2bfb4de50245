"""What a step costs the scheduler: the real core and the real codecs, no sockets, synthetic answers.

Measured per step, as CPU time of the thread, so that other work on the machine counts only for the caches it takes:
*commit* from an answer's bytes in hand to the front ends' bytes ready, *plan* from there to the next plan's bytes
ready. Shipped defaults, prefix cache on, tracing at 1 % where the environment turns it on, row lengths staggered,
prompts of 2,048 tokens whose block keys come from the front door.

Scenarios: `steady` (everybody decodes), `churn` (8 requests end and 8 arrive in every step), `queued` (as churn, with
100,000 requests waiting, per policy); `admission` is the cost of queueing one of them.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from scheduler_svc import frontend_link, worker_link
from scheduler_svc.core import effects as ef
from scheduler_svc.core import events as ev
from scheduler_svc.core.config import POLICIES, CoreConfig
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.frontend_link import Outgoing
from scheduler_svc.tracing import SchedulerTracing
from shared.columns import to_column
from shared.prefix_keys import following_keys, root_key
from shared.telemetry import Telemetry

PROMPT_TOKENS = 2048
BLOCK_SIZE = 16
QUEUED_PROMPT_TOKENS = 128
"""Of those that wait, so that 100,000 of them fit into memory."""
CHURN = 8
TRACED_SHARE = 0.01
STEP_S = 0.02
VOCAB = 32_000
_FRONTEND, _WORKER = b"frontend/1", b"worker/1"
_TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True, slots=True)
class CoreResult:
    """Microseconds per step; admission per request."""

    scenario: str
    rows: int
    queued: int
    policy: str
    plan_us_p50: float
    commit_us_p50: float
    total_us_p50: float
    total_us_p99: float
    admission_us_p50: float


class _Worker:
    """Answers plans: knows which rows decode, makes tokens up."""

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


class _Bench:
    """One core with `rows` running requests."""

    def __init__(self, rows: int, policy: str, telemetry: Telemetry) -> None:
        config = CoreConfig(
            policy=policy,
            max_num_seqs=rows,
            # Nobody waits for the budget: all start in one step, so that in churn as many end in every step as arrive.
            max_num_batched_tokens=1 << 20,
            max_queued_requests=1 << 20,
            max_queued_tokens=1 << 40,
        )
        self._core = Scheduler(config, incarnation=1 << 40)
        self._tracing = SchedulerTracing(telemetry, 0)
        self._worker = _Worker(rows)
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
        self._core.handle(
            ev.WorkerHello(
                worker=_WORKER, worker_id="w", model=model, block_size=BLOCK_SIZE, num_blocks=blocks, max_rows=rows,
                max_tokens_per_step=1 << 20,
            ),
            self._now,
        )  # fmt: skip

    def submission(self, max_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> bytes:
        """A front end's frame with one request."""
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
            tenant=f"tenant-{self._stream % 50}",
            priority=self._stream % 5,
            traceparent=_TRACEPARENT if self._random.random() < TRACED_SHARE else "",
            block_keys=following_keys(root_key("f", b""), tokens, BLOCK_SIZE),
            block_size=BLOCK_SIZE,
        )
        return link_pb2.FrontendMessage(submissions=[submission]).SerializeToString()

    def submit(self, frame: bytes, outgoing: Outgoing) -> None:
        """Takes a front end's frame in."""
        for event in frontend_link.decode(_FRONTEND, frame, self._now).events:
            self._carry_out(self._core.handle(event, self._now), outgoing)

    def steps(self, count: int, arrivals: Iterator[list[bytes]]) -> Iterator[tuple[int, int]]:
        """Runs steps with two plans in flight; yields (commit, plan) nanoseconds of each."""
        answers = [self._worker.answer(plan) for plan in self._plans(outgoing=Outgoing())[0]]
        for _ in range(count):
            answer = answers.pop(0)
            frames = next(arrivals)
            self._now += STEP_S
            begin = time.thread_time_ns()
            outgoing = Outgoing()
            event, _ = worker_link.decode(_WORKER, answer)
            self._carry_out(self._core.handle(event, self._now), outgoing)
            for frame in frames:
                self.submit(frame, outgoing)
            outgoing.encode(1 << 40)
            committed = time.thread_time_ns()
            plans, _ = self._plans(Outgoing())
            planned = time.thread_time_ns()
            answers += [self._worker.answer(plan) for plan in plans]
            yield committed - begin, planned - committed

    def _plans(self, outgoing: Outgoing) -> tuple[list[Plan], list[bytes]]:
        plans, frames = [], []
        while (plan := self._core.plan(_WORKER, self._now + STEP_S)) is not None:
            self._carry_out(self._core.take_effects(), outgoing)
            step, attempts = self._tracing.plan_issued(plan, self._now)
            frames.append(worker_link.encode_plan(plan, step_traceparent=step, attempt_traceparents=attempts))
            plans.append(plan)
        return plans, frames

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


def bench_steady(rows: int, steps: int, telemetry: Telemetry) -> CoreResult:
    """Everybody decodes; nobody comes or goes."""
    bench = _Bench(rows, "fcfs", telemetry)
    for _ in range(rows):
        bench.submit(bench.submission(max_tokens=1 << 16), Outgoing())
    return _measure(bench, "steady", rows, 0, "fcfs", steps, [], warmup=rows // 4 + 200)


def bench_churn(rows: int, steps: int, telemetry: Telemetry, *, policy: str = "fcfs", queued: int = 0) -> CoreResult:
    """`CHURN` requests end and arrive in every step, with `queued` more waiting all the time."""
    bench = _Bench(rows, policy, telemetry)
    lifetime = max(2, rows // CHURN)
    warmup = 4 * lifetime + 100
    admission: list[float] = []
    if queued:
        # Of different lengths, so that they end at different times.
        distinct = [bench.submission(2 + index * lifetime // 32, QUEUED_PROMPT_TOKENS) for index in range(64)]
        for index in range(queued):
            frame = link_pb2.FrontendMessage.FromString(distinct[index % 64])
            frame.submissions[0].stream = 1_000_000 + index
            frame.submissions[0].tenant = f"tenant-{index % 50}"
            frame.submissions[0].priority = index % 5
            encoded = frame.SerializeToString()
            begin = time.thread_time_ns()
            bench.submit(encoded, Outgoing())
            admission.append((time.thread_time_ns() - begin) / 1e3)
    else:
        for index in range(rows):
            bench.submit(bench.submission(max_tokens=2 + index % lifetime), Outgoing())
    return _measure(bench, "queued" if queued else "churn", rows, queued, policy, steps, admission, warmup, churn=True)


def _measure(
    bench: _Bench,
    scenario: str,
    rows: int,
    queued: int,
    policy: str,
    steps: int,
    admission: list[float],
    warmup: int,
    *,
    churn: bool = False,
) -> CoreResult:
    def arrivals() -> Iterator[list[bytes]]:
        while True:
            yield [bench.submission(max(2, rows // CHURN)) for _ in range(CHURN)] if churn else []

    timings = list(bench.steps(warmup + steps, arrivals()))[warmup:]
    commits = np.array([commit for commit, _ in timings]) / 1e3
    plans = np.array([plan for _, plan in timings]) / 1e3
    totals = commits + plans
    return CoreResult(
        scenario=scenario,
        rows=rows,
        queued=queued,
        policy=policy,
        plan_us_p50=round(float(np.median(plans)), 1),
        commit_us_p50=round(float(np.median(commits)), 1),
        total_us_p50=round(float(np.median(totals)), 1),
        total_us_p99=round(float(np.percentile(totals, 99)), 1),
        admission_us_p50=round(float(np.median(admission)), 1) if admission else 0.0,
    )


def as_json(results: list[CoreResult]) -> dict[str, list[dict[str, object]]]:
    """The shape that `quire bench scheduler --json` writes."""
    return {"results": [asdict(result) for result in results]}


def run_all(steps: int, queued: int) -> list[CoreResult]:
    """Every scenario once."""
    telemetry = Telemetry("quire-bench")
    results = [bench_steady(rows, steps, telemetry) for rows in (16, 256, 1024, 4096)]
    results.append(bench_churn(256, steps, telemetry))
    results += [bench_churn(256, steps // 4, telemetry, policy=policy, queued=queued) for policy in POLICIES]
    return results


def median_of(repeated: Sequence[CoreResult]) -> CoreResult:
    """The median of each figure over repeated runs of one scenario."""
    figures = ("plan_us_p50", "commit_us_p50", "total_us_p50", "total_us_p99", "admission_us_p50")
    medians = {name: round(statistics.median(getattr(each, name) for each in repeated), 1) for name in figures}
    return dataclasses.replace(repeated[0], **medians)
