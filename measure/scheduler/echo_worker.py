"""Echo workers of `quire bench link`: they implement the plan protocol but compute nothing.

Each worker has a simulated device with a given step time. Like an asynchronous GPU, the device starts the next step
when the last one ends, if its plan has arrived. The worker's wait is the time from the end of a step to the arrival of
the next plan. A plan has arrived when this process has read it from the socket, so delays in this process count as
wait. The process sends a result when it wakes up after the end of a step; it does not spin.

A worker tracks only the row state that results need: which rows decode, and how many prompt tokens remain for the
others.

One process runs many workers, each with its own socket. It prints `joined` when all workers have received Welcome. It
prints `measuring` when the wanted number of rows decode and the warm-up is over. Finally it prints a line of JSON with
its `EchoReport`. It exits when its standard input is closed, so that it does not outlive its parent. Linux only
(`epoll`).
"""

import argparse
import heapq
import json
import math
import select
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import zmq

from measure.spread import Spread
from protos.quire.plan.v1 import plan_pb2
from shared.columns import from_column, to_column
from shared.frames import PLAN_MAX_MESSAGE, PLAN_VERSIONS
from shared.ids import draw_incarnation, routing_id
from shared.sockets import connect_dealer

VOCAB = 32_000
BLOCK_SIZE = 16
FINGERPRINT = "f"
"""Fingerprint of the simulated model."""
FIRST_TOKEN = 3
"""Lowest token ID; lower ones are special tokens."""
WARM_UP_S = 0.5
"""Warm-up in which the scheduler learns the time of a step."""
_MAX_SLEEP_S = 1.0
_NUM_DRAWS = 16
"""Number of token columns drawn in advance, which steps use in turn."""


class EchoError(Exception):
    """The scheduler violated the protocol, or a timeout expired."""


@dataclass(frozen=True, slots=True)
class EchoReport:
    """Measurements for all workers in one process; times in seconds."""

    elapsed_s: float
    steps: int
    """Steps that all workers have completed."""
    wait_s: float
    """Total wait of all workers."""
    worst_wait_s: float
    """Total wait of the worker that waited longest."""
    worst_worker: str
    """Name of this worker."""
    wait_p50_s: float
    """Median wait before a step; 0 if the plan had arrived."""
    wait_p99_s: float
    late_p50_s: float
    """Median delay between a step's end and sending its result, caused by this process."""
    late_p99_s: float
    num_rows: int
    """Rows in decode at the end."""


class Timeline:
    """Start and end times of the steps on one simulated device, in seconds of a monotonic clock."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._free_at: float | None = None
        """End of the last known step; None before the first."""
        self._ends: deque[float] = deque()
        self._since = float("inf")
        self.waits: list[float] = []
        """Waits before each step since `measure_from`, in seconds."""

    def measure_from(self, now: float) -> None:
        """Start measuring."""
        self._since = now
        self.waits.clear()

    def plan_arrived(self, now: float) -> float:
        """Schedule a plan's step; return how long the device was idle before it."""
        free_at = now if self._free_at is None else self._free_at
        start = max(free_at, now)
        if now >= self._since:
            self.waits.append(max(0.0, start - max(free_at, self._since)))
        self._free_at = start + self._step_s
        self._ends.append(self._free_at)
        return start - free_at

    def next_end(self) -> float | None:
        """Return the end of the oldest unreported step; None if there is none."""
        return self._ends[0] if self._ends else None

    def answered(self) -> float:
        """Remove the oldest unreported step; return when it ended."""
        return self._ends.popleft()

    def wait_until(self, end: float) -> float:
        """Return the total wait from `measure_from` to `end`, including a wait in progress."""
        ongoing = end - max(self._free_at, self._since) if self._free_at is not None and not self._ends else 0.0
        return sum(self.waits) + max(0.0, ongoing)


class EchoRows:
    """Row state of one worker, as far as results need it."""

    def __init__(self, max_rows: int, seed: int) -> None:
        self._decodes = np.zeros(max_rows, np.bool_)
        self._held = np.zeros(max_rows, np.bool_)
        self._left = np.zeros(max_rows, np.int32)
        """Prompt tokens that remain to be computed, by row."""
        rng = np.random.default_rng(seed)
        self._draws = [to_column(rng.integers(FIRST_TOKEN, VOCAB, max_rows)) for _ in range(_NUM_DRAWS)]
        self._sampling = b""
        """Cached column of rows in decode, until a plan changes them."""

    @property
    def num_sampling(self) -> int:
        """Number of rows in decode."""
        return len(self._sampling) // 4

    def apply(self, plan: plan_pb2.Plan) -> tuple[bytes, bytes]:
        """Apply a plan; return the row and token columns of its result."""
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
    """One worker with its connection, its rows and its simulated device."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, hello: plan_pb2.Hello, step_s: float
    ) -> None:
        self.socket = connect_dealer(
            context, address, identity=routing_id(hello.worker_id, hello.incarnation), max_message=PLAN_MAX_MESSAGE
        )
        self.name = hello.worker_id
        self.timeline = Timeline(step_s)
        self.rows = EchoRows(hello.max_rows, seed=hello.incarnation)
        self.epoch = 0
        """Epoch of the worker; 0 before Welcome."""
        self._unanswered: deque[plan_pb2.StepResult] = deque()
        self._step_s = step_s
        self._next_step = 1
        self._max_in_flight = 0
        self._send(plan_pb2.WorkerMessage(hello=hello))

    def take_frames(self) -> bool:
        """Handle the frames that have arrived; return whether a step was added to an empty queue.

        Raises:
            EchoError: the scheduler violated the protocol or refused this worker.
        """
        was_idle = not self._unanswered
        while True:
            try:
                frame = self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return was_idle and bool(self._unanswered)
            self._take(frame, time.monotonic())

    def answer(self) -> float:
        """Send the oldest step's result; return when the step ended."""
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
                raise EchoError(f"the scheduler refused the worker: {message.refused.reason}")
            case body:
                raise EchoError(f"unexpected message from the scheduler: {body!r}")

    def _take_plan(self, message: plan_pb2.SchedulerMessage, now: float) -> None:
        plan = message.plan
        if message.epoch != self.epoch or plan.step != self._next_step or len(self._unanswered) >= self._max_in_flight:
            raise EchoError(f"unexpected plan {plan.step} of epoch {message.epoch:x} after plan {self._next_step - 1}")
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
            raise EchoError("the scheduler does not read: the send queue is full") from None


class EchoProcess:
    """Loop that runs all workers of this process."""

    def __init__(self, workers: Sequence[EchoWorker]) -> None:
        self._workers = workers
        self._by_descriptor = {worker.socket.FD: worker for worker in workers}
        self._poll = select.epoll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._agenda: list[tuple[float, int]] = []
        """Heap of (end of the oldest unreported step, worker index), for each worker with a step."""
        self._index = {id(worker): index for index, worker in enumerate(workers)}
        self._lateness: list[float] = []
        self._is_measured = self._is_ended = False
        """Whether the report was made, and whether standard input was closed after that."""

    def run(self, seconds: float, give_up_s: float, *, begin_rows: int) -> EchoReport:
        """Join, warm up, and measure for `seconds` once `begin_rows` rows are in decode.

        Raises:
            EchoError: see `EchoWorker`, or fewer rows were in decode after `give_up_s` seconds.
        """
        workers, give_up = self._workers, time.monotonic() + give_up_s
        for worker in workers:
            self._take_frames(worker)
        while not all(worker.epoch for worker in workers):
            self._turn(give_up, "the Welcome of every worker")
        print("joined", flush=True)
        while self._num_sampling() < begin_rows:
            self._turn(give_up, "all rows to run")
        self._turns_until(time.monotonic() + WARM_UP_S)
        print("measuring", flush=True)
        begin = time.monotonic()
        for worker in workers:
            worker.timeline.measure_from(begin)
        self._lateness.clear()
        self._turns_until(begin + seconds)
        return self._report(begin, time.monotonic(), begin_rows)

    def serve(self) -> None:
        """Serve until standard input is closed.

        The loss of all workers takes the scheduler a long time, which must not count as part of the measurement.
        """
        self._is_measured = True
        while not self._is_ended:
            self._turn(math.inf)

    def _num_sampling(self) -> int:
        return sum(worker.rows.num_sampling for worker in self._workers)

    def _report(self, begin: float, end: float, begin_rows: int) -> EchoReport:
        waits = [worker.timeline.wait_until(end) for worker in self._workers]
        steps = len(self._lateness)
        if steps == 0 or self._num_sampling() < begin_rows:
            raise EchoError("rows ended during the measurement" if steps else "no step was answered")
        wait = Spread.of(wait for worker in self._workers for wait in worker.timeline.waits)
        late = Spread.of(self._lateness)
        return EchoReport(
            elapsed_s=end - begin,
            steps=steps,
            wait_s=sum(waits),
            worst_wait_s=max(waits),
            worst_worker=self._workers[waits.index(max(waits))].name,
            wait_p50_s=wait.p50,
            wait_p99_s=wait.p99,
            late_p50_s=late.p50,
            late_p99_s=late.p99,
            num_rows=self._num_sampling(),
        )

    def _turns_until(self, end: float) -> None:
        while time.monotonic() < end:
            self._turn(end)

    def _turn(self, end: float, awaited: str = "") -> None:
        """Sleep until a step ends, a frame arrives, or `end`; then handle the steps and frames."""
        now = time.monotonic()
        if awaited and now > end:
            raise EchoError(f"timeout: no answer while waiting for {awaited}")
        wake = min(end, self._agenda[0][0] if self._agenda else math.inf, now + _MAX_SLEEP_S)
        # `epoll` waits in whole milliseconds, while `select` on its descriptor waits in microseconds.
        if select.select([self._poll.fileno()], [], [], max(0.0, wake - now))[0]:
            for descriptor, _ in self._poll.poll(0):
                worker = self._by_descriptor.get(descriptor)
                if worker is not None:
                    self._take_frames(worker)
                elif self._is_measured:
                    self._is_ended = True
                else:
                    raise EchoError("the parent process ended")
        while self._agenda and self._agenda[0][0] <= (now := time.monotonic()):
            index = heapq.heappop(self._agenda)[1]
            worker = self._workers[index]
            ended = worker.answer()
            self._lateness.append(now - ended)
            if worker.timeline.next_end() is not None:
                self._enter(worker)
            # Sending may have cleared the event that announced a received frame.
            self._take_frames(worker)

    def _take_frames(self, worker: EchoWorker) -> None:
        if worker.take_frames():
            self._enter(worker)

    def _enter(self, worker: EchoWorker) -> None:
        end = worker.timeline.next_end()
        assert end is not None
        heapq.heappush(self._agenda, (end, self._index[id(worker)]))


def main(arguments: Sequence[str]) -> int:
    """Run the process; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--address", required=True)
    add("--workers", type=int, required=True)
    add("--rows", type=int, required=True)
    add("--begin-rows", type=int, required=True)
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
        process = EchoProcess(workers)
        report = process.run(options.seconds, options.give_up_s, begin_rows=options.begin_rows)
        print(json.dumps(asdict(report)), flush=True)
        process.serve()
    except EchoError as error:
        print(f"quire bench link: {error}", file=sys.stderr)
        return 1
    finally:
        for worker in workers:
            worker.socket.close()
        context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
