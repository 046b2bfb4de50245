"""The workers of `quire bench link`: they speak the plan protocol truthfully and compute nothing.

A step *takes* its time on a pretended device, which starts the next step the moment the last one ends if the plan is in
hand by then, as an asynchronous GPU does. What passes between the end of a step and having the next plan in hand is
the worker's wait. Received means taken from the socket by this process, so what this process is late by counts as wait
too. Answers go out when this process wakes up after the end of a step, which it does without spinning.

Rows are kept as far as an answer needs them: which of them decode, and how much of their prompts the others still lack.

One process plays many workers, each with a socket of its own. It prints `joined` when all of them were welcomed,
`measuring` when every row decodes and the warm-up is over, and a line of JSON with its `EchoReport`. It ends when its
standard input does, which is how it does not outlive its parent. Linux only (`epoll`).
"""

import argparse
import heapq
import json
import select
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import zmq

from protos.quire.plan.v1 import plan_pb2
from shared.columns import from_column, to_column
from shared.frames import PLAN_VERSIONS
from shared.ids import draw_incarnation, routing_id
from shared.sockets import PLAN_MAX_MESSAGE, connect_dealer

VOCAB = 32_000
BLOCK_SIZE = 16
FINGERPRINT = "f"
"""Of the pretended model."""
FIRST_TOKEN = 3
"""Smaller ones would be special tokens."""
WARM_UP_S = 0.5
"""For the scheduler to learn how long a step takes."""
_NUM_DRAWS = 16
"""Columns of tokens drawn beforehand; steps take them in turn."""


class EchoError(Exception):
    """The scheduler did what it must not, or nothing came of it in time."""


@dataclass(frozen=True, slots=True)
class EchoReport:
    """What all workers of one process measured together; times in seconds."""

    elapsed_s: float
    steps: int
    """Answered in that time by all workers."""
    wait_s: float
    """Sum over the workers."""
    worst_wait_s: float
    """Of the worker that waited longest."""
    wait_p50_s: float
    """Of the waits before each step, zero where the plan was there."""
    wait_p99_s: float
    late_p50_s: float
    """How long after the end of its step an answer went out: this process's own slowness."""
    late_p99_s: float


class Timeline:
    """When the steps of one pretended device begin and end; all times of one monotonic clock, in seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._free_at: float | None = None
        """When the last known step ends; None before the first."""
        self._ends: deque[float] = deque()
        self._since = float("inf")
        self.waits: list[float] = []
        """Before each step that arrived since `measure_from`."""

    def measure_from(self, now: float) -> None:
        """Waiting counts from now on."""
        self._since = now
        self.waits.clear()

    def plan_arrived(self, now: float) -> float:
        """Takes a plan into hand; returns how long the device was idle before its step."""
        free_at = now if self._free_at is None else self._free_at
        start = max(free_at, now)
        if now >= self._since:
            self.waits.append(max(0.0, start - max(free_at, self._since)))
        self._free_at = start + self._step_s
        self._ends.append(self._free_at)
        return start - free_at

    def next_end(self) -> float | None:
        """When the oldest unanswered step ends."""
        return self._ends[0] if self._ends else None

    def answered(self) -> float:
        """The oldest step is being answered; returns when it ended."""
        return self._ends.popleft()

    def wait_until(self, end: float) -> float:
        """All waiting from `measure_from` to `end`, with the wait that goes on then."""
        ongoing = end - max(self._free_at, self._since) if self._free_at is not None and not self._ends else 0.0
        return sum(self.waits) + max(0.0, ongoing)


class EchoRows:
    """The rows of one worker, as far as answers need them."""

    def __init__(self, max_rows: int, seed: int) -> None:
        self._decodes = np.zeros(max_rows, np.bool_)
        self._held = np.zeros(max_rows, np.bool_)
        self._left = np.zeros(max_rows, np.int32)
        """Prompt tokens that are not computed."""
        rng = np.random.default_rng(seed)
        self._draws = [to_column(rng.integers(FIRST_TOKEN, VOCAB, max_rows)) for _ in range(_NUM_DRAWS)]
        self._sampling = b""
        """Column of the rows that sample as long as plans change nothing."""

    @property
    def is_full(self) -> bool:
        """Whether all rows sample in every step."""
        return len(self._sampling) == 4 * len(self._decodes)

    def apply(self, plan: plan_pb2.Plan) -> tuple[bytes, bytes]:
        """Carries a plan out; the columns of rows and tokens that its answer holds."""
        if plan.leaves or plan.admissions or plan.chunk_rows or plan.holds or plan.releases:
            self._change(plan)
        tokens = self._draws[plan.step % _NUM_DRAWS][: len(self._sampling)]
        return self._sampling, tokens

    def _change(self, plan: plan_pb2.Plan) -> None:
        leaves = from_column(plan.leaves)
        self._decodes[leaves] = self._held[leaves] = False
        for admission in plan.admissions:
            self._left[admission.row] = len(admission.token_ids) // 4 - admission.num_computed_tokens
        self._held[from_column(plan.holds)] = True
        self._held[from_column(plan.releases)] = False
        chunk_rows = from_column(plan.chunk_rows)
        self._left[chunk_rows] -= from_column(plan.chunk_lengths)
        self._decodes[chunk_rows[self._left[chunk_rows] == 0]] = True
        self._sampling = to_column(np.flatnonzero(self._decodes & ~self._held))


class EchoWorker:
    """One worker: its connection, its rows, its pretended device."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, hello: plan_pb2.Hello, step_s: float
    ) -> None:
        self.socket = connect_dealer(
            context, address, identity=routing_id(hello.worker_id, hello.incarnation), max_message=PLAN_MAX_MESSAGE
        )
        self.timeline = Timeline(step_s)
        self.rows = EchoRows(hello.max_rows, seed=hello.incarnation)
        self.epoch = 0
        """0 until Welcome."""
        self._unanswered: deque[plan_pb2.StepResult] = deque()
        self._step_s = step_s
        self._next_step = 1
        self._max_in_flight = 0
        self._send(plan_pb2.WorkerMessage(hello=hello))

    def take_frames(self) -> bool:
        """Takes in what has arrived; returns whether a step is in hand now that none was before.

        Raises:
            EchoError: the scheduler broke the protocol, or does not want this worker.
        """
        was_idle = not self._unanswered
        while True:
            try:
                frame = self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return was_idle and bool(self._unanswered)
            self._take(frame, time.monotonic())

    def answer(self) -> float:
        """Answers the oldest step; returns when it ended."""
        ended = self.timeline.answered()
        result = self._unanswered.popleft()
        self._send(plan_pb2.WorkerMessage(epoch=self.epoch, result=result))
        return ended

    def _take(self, frame: bytes, now: float) -> None:
        message = plan_pb2.SchedulerMessage.FromString(frame)
        match message.WhichOneof("body"):
            case "ping":
                pass
            case "plan":
                self._take_plan(message, now)
            case "welcome":
                self.epoch = message.epoch
                self._max_in_flight = message.welcome.max_in_flight
            case "refused":
                raise EchoError(f"the scheduler refuses the worker: {message.refused.reason}")
            case body:
                raise EchoError(f"the scheduler says {body!r}")

    def _take_plan(self, message: plan_pb2.SchedulerMessage, now: float) -> None:
        plan = message.plan
        if message.epoch != self.epoch or plan.step != self._next_step or len(self._unanswered) >= self._max_in_flight:
            raise EchoError(f"plan {plan.step} of epoch {message.epoch:x} is a surprise after {self._next_step - 1}")
        self._next_step += 1
        idle_s = self.timeline.plan_arrived(now)
        rows, tokens = self.rows.apply(plan)
        received_unix_ns = time.time_ns()
        self._unanswered.append(
            plan_pb2.StepResult(
                step=plan.step,
                rows=rows,
                tokens=tokens,
                timings=plan_pb2.StepTimings(
                    received_unix_ns=received_unix_ns,
                    started_unix_ns=received_unix_ns,
                    forward_ns=int(self._step_s * 1e9),
                    idle_before_ns=int(idle_s * 1e9),
                    num_tokens=len(rows) // 4,
                ),
            )
        )

    def _send(self, message: plan_pb2.WorkerMessage) -> None:
        try:
            self.socket.send(message.SerializeToString(), zmq.DONTWAIT)
        except zmq.Again:
            raise EchoError("the scheduler takes no more frames") from None


class EchoProcess:
    """All workers of this process, in one loop."""

    def __init__(self, workers: Sequence[EchoWorker]) -> None:
        self._workers = workers
        self._by_descriptor = {worker.socket.FD: worker for worker in workers}
        self._poll = select.epoll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._agenda: list[tuple[float, int]] = []
        """(end of the oldest unanswered step, index of the worker), one entry for each worker with a step."""
        self._index = {id(worker): index for index, worker in enumerate(workers)}
        self._lateness: list[float] = []

    def run(self, seconds: float, give_up_s: float) -> EchoReport:
        """Joins, warms up, measures.

        Raises:
            EchoError: see `EchoWorker`, or the rows were not all decoding after `give_up_s` seconds.
        """
        workers, give_up = self._workers, time.monotonic() + give_up_s
        for worker in workers:
            self._take_frames(worker)
        while not all(worker.epoch for worker in workers):
            self._turn(give_up, "not every worker was welcomed")
        print("joined", flush=True)
        while not all(worker.rows.is_full for worker in workers):
            self._turn(give_up, "not every row is running")
        self._turns_until(time.monotonic() + WARM_UP_S)
        print("measuring", flush=True)
        begin = time.monotonic()
        for worker in workers:
            worker.timeline.measure_from(begin)
        self._lateness.clear()
        self._turns_until(begin + seconds)
        return self._report(begin, time.monotonic())

    def _report(self, begin: float, end: float) -> EchoReport:
        waits = [worker.timeline.wait_until(end) for worker in self._workers]
        steps = len(self._lateness)
        if steps == 0 or not all(worker.rows.is_full for worker in self._workers):
            raise EchoError("rows left while it was measured" if steps else "no step was answered")
        wait_p50, wait_p99 = _percentiles(wait for worker in self._workers for wait in worker.timeline.waits)
        late_p50, late_p99 = _percentiles(self._lateness)
        return EchoReport(
            elapsed_s=end - begin,
            steps=steps,
            wait_s=sum(waits),
            worst_wait_s=max(waits),
            wait_p50_s=wait_p50,
            wait_p99_s=wait_p99,
            late_p50_s=late_p50,
            late_p99_s=late_p99,
        )

    def _turns_until(self, end: float) -> None:
        while time.monotonic() < end:
            self._turn(end)

    def _turn(self, end: float, trouble: str = "") -> None:
        """Sleeps until a step ends or a frame is there, but not beyond `end`, and does what is to be done."""
        now = time.monotonic()
        if trouble and now > end:
            raise EchoError(f"{trouble} in time")
        wake = min(end, self._agenda[0][0]) if self._agenda else end
        # `epoll` itself waits in whole milliseconds; `select` on it does in microseconds.
        if select.select([self._poll.fileno()], [], [], max(0.0, wake - now))[0]:
            for descriptor, _ in self._poll.poll(0):
                worker = self._by_descriptor.get(descriptor)
                if worker is None:
                    raise EchoError("the parent is gone")
                self._take_frames(worker)
        while self._agenda and self._agenda[0][0] <= (now := time.monotonic()):
            index = heapq.heappop(self._agenda)[1]
            worker = self._workers[index]
            ended = worker.answer()
            self._lateness.append(now - ended)
            if worker.timeline.next_end() is not None:
                self._enter(worker)
            # Sending may have swallowed the sign that a frame is there.
            self._take_frames(worker)

    def _take_frames(self, worker: EchoWorker) -> None:
        if worker.take_frames():
            self._enter(worker)

    def _enter(self, worker: EchoWorker) -> None:
        end = worker.timeline.next_end()
        assert end is not None
        heapq.heappush(self._agenda, (end, self._index[id(worker)]))


def _percentiles(values: Iterable[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    p50, p99 = np.percentile(np.fromiter(values, np.float64), (50, 99))
    return float(p50), float(p99)


def main(arguments: Sequence[str]) -> int:
    """Runs the process; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--address", required=True)
    add("--workers", type=int, required=True)
    add("--rows", type=int, required=True)
    add("--step-ms", type=float, required=True)
    add("--max-model-len", type=int, required=True)
    add("--num-blocks", type=int, required=True)
    add("--max-tokens-per-step", type=int, required=True)
    add("--seconds", type=float, required=True)
    add("--give-up-s", type=float, required=True)
    options = parser.parse_args(arguments)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hellos = [
        plan_pb2.Hello(
            protocol_version=PLAN_VERSIONS.newest,
            worker_id=f"echo-{index}",
            incarnation=draw_incarnation(),
            model=plan_pb2.ModelInfo(
                name="echo", architecture="Echo", fingerprint=FINGERPRINT, max_model_len=options.max_model_len,
                vocab_size=VOCAB, dtype="none", eos_token_ids=[2],
            ),
            block_size=BLOCK_SIZE,
            num_blocks=options.num_blocks,
            max_rows=options.rows,
            max_tokens_per_step=options.max_tokens_per_step,
            num_kv_groups=1,
            device="none",
        )
        for index in range(options.workers)
    ]  # fmt: skip
    workers = [EchoWorker(context, options.address, hello, options.step_ms / 1000) for hello in hellos]
    try:
        report = EchoProcess(workers).run(options.seconds, options.give_up_s)
    except EchoError as error:
        print(f"quire bench link: {error}", file=sys.stderr)
        return 1
    finally:
        for worker in workers:
            worker.socket.close()
        context.term()
    print(json.dumps(asdict(report)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
