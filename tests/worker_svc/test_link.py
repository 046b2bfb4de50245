"""A real worker process and a scheduler made of a ROUTER: epochs, incarnations, and an orderly end."""

import json
import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from checks.driver import Driver, make_engine
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import QUIRE, ROOT
from protos.quire.plan.v1 import plan_pb2
from shared.columns import from_column, to_column
from shared.frames import PLAN_MAX_MESSAGE, PLAN_VERSIONS
from shared.sockets import SendOutcome, bind_router, endpoint, receive_from, send_to
from worker_svc.model.config import break_even_context, read_config

START_MS = 60_000
ANSWER_MS = 20_000
PROMPT = [3, 1, 4, 1, 5]


@dataclass(slots=True)
class Scheduler:
    """The scheduler's side of one worker process."""

    router: "zmq.Socket[bytes]"
    process: "subprocess.Popen[str]"
    peer: bytes = b""
    epoch: int = 0

    def receive(self, timeout_ms: int = ANSWER_MS) -> plan_pb2.WorkerMessage:
        """The next message from the worker; it becomes the peer."""
        assert self.router.poll(timeout_ms), "the worker says nothing"
        received = receive_from(self.router)
        assert received is not None
        self.peer, payload = received
        return plan_pb2.WorkerMessage.FromString(payload)

    def hello(self, timeout_ms: int = ANSWER_MS) -> plan_pb2.Hello:
        """The next Hello; messages of earlier incarnations are skipped."""
        while True:
            message = self.receive(timeout_ms)
            if message.WhichOneof("body") == "hello":
                assert message.epoch == 0
                return message.hello

    def send(self, message: plan_pb2.SchedulerMessage) -> None:
        """Sends to the present incarnation."""
        assert send_to(self.router, self.peer, message.SerializeToString()) is SendOutcome.SENT

    def send_plan(self, plan: plan_pb2.Plan, *, epoch: int | None = None) -> None:
        """Send a plan to the worker."""
        self.send(plan_pb2.SchedulerMessage(epoch=self.epoch if epoch is None else epoch, plan=plan))

    def welcome(self, *, silence_ms: int = 60_000) -> None:
        """Opens a new epoch."""
        self.epoch += 10
        welcome = plan_pb2.Welcome(max_in_flight=2, silence_ms=silence_ms)
        self.send(plan_pb2.SchedulerMessage(epoch=self.epoch, welcome=welcome))

    def begin_again(self, **settings: int) -> plan_pb2.Hello:
        """A fresh incarnation and a fresh epoch."""
        self.send(plan_pb2.SchedulerMessage(unknown=plan_pb2.Unknown()))
        hello = self.hello()
        self.welcome(**settings)
        return hello

    def result(self, step: int) -> plan_pb2.StepResult:
        """The answer to `step`."""
        message = self.receive()
        assert message.WhichOneof("body") == "result", message
        assert (message.epoch, message.result.step) == (self.epoch, step)
        return message.result


def start_worker(router: "zmq.Socket[bytes]", model: Path, *flags: str) -> "subprocess.Popen[str]":
    """A worker process connected to `router`."""
    command = [*QUIRE, "worker", f"--worker-address={endpoint(router)}", f"--model={model}"]
    return subprocess.Popen(
        [*command, "--kv-cache-memory=8MiB", "--max-num-seqs=4", "--num-threads=1", *flags],
        cwd=ROOT,
        env=os.environ | {"QUIRE_LOG_FORMAT": "json"},
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def bound_router() -> Iterator["zmq.Socket[bytes]"]:
    """A ROUTER on a free port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield bind_router(context, "tcp://127.0.0.1:0", max_message=PLAN_MAX_MESSAGE)
    context.destroy(linger=0)


@pytest.fixture
def router() -> Iterator["zmq.Socket[bytes]"]:
    """Yield a router socket."""
    with bound_router() as socket:
        yield socket


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def scheduler(checkpoint: Path) -> Iterator[Scheduler]:
    """One worker process for all tests that do not kill it; each test begins a new epoch."""
    with bound_router() as router:
        process = start_worker(router, checkpoint, "--worker-id=tested")
        running = Scheduler(router, process)
        running.hello(START_MS)
        yield running
        process.kill()
        process.communicate()


def prefill_plan(step: int = 1) -> plan_pb2.Plan:
    """Admits `PROMPT` to row 1 and computes all of it."""
    admission = plan_pb2.Admission(
        row=1, generation=1, token_ids=to_column(PROMPT), num_prompt_tokens=5, block_tables=[to_column([6])]
    )
    return plan_pb2.Plan(
        step=step, admissions=[admission], chunk_rows=to_column([1]), chunk_lengths=to_column([len(PROMPT)])
    )


def test_a_worker_presents_itself_and_answers_plans(scheduler: Scheduler, checkpoint: Path) -> None:
    """Hello describes worker and model; the tokens in its results equal the engine's."""
    hello = scheduler.begin_again()
    scheduler.send_plan(prefill_plan())
    for step in (2, 3):
        scheduler.send_plan(plan_pb2.Plan(step=step))
        if step == 2:
            first = scheduler.result(1)
    tokens = [int(from_column(r.tokens)[0]) for r in (first, scheduler.result(2), scheduler.result(3))]

    assert (hello.protocol_version, hello.worker_id, hello.pid) == (
        PLAN_VERSIONS.oldest,
        "tested",
        scheduler.process.pid,
    )
    assert (hello.block_size, hello.max_rows, hello.max_tokens_per_step, hello.num_kv_groups) == (16, 4, 512, 1)
    assert (hello.model.architecture, hello.model.vocab_size, hello.model.dtype) == ("LlamaForCausalLM", 384, "float32")
    assert (hello.model.max_model_len, list(hello.model.eos_token_ids)) == (1024, [2])
    assert hello.model.break_even_context == break_even_context(read_config(checkpoint)) > 0
    assert hello.num_blocks == 4 * (1024 // 16 + 1)
    assert len(hello.model.fingerprint) == 64
    assert scheduler.peer == b"tested/%016x" % hello.incarnation
    assert tokens == Driver(make_engine(checkpoint)).generate(PROMPT, 3)
    assert first.timings.received_unix_ns > 0


def test_a_plan_of_another_epoch_is_dropped(scheduler: Scheduler) -> None:
    """It is neither executed nor answered, and it does not disturb the epoch."""
    scheduler.begin_again()

    scheduler.send_plan(prefill_plan(), epoch=scheduler.epoch - 10)
    scheduler.send_plan(prefill_plan())

    assert from_column(scheduler.result(1).rows).tolist() == [1]
    assert not scheduler.router.poll(100)


def test_unknown_brings_a_new_incarnation(scheduler: Scheduler) -> None:
    """An unknown worker sends Hello with a new routing id, and its old rows are gone."""
    first = scheduler.begin_again()
    old_peer = scheduler.peer
    scheduler.send_plan(prefill_plan())
    scheduler.result(1)

    second = scheduler.begin_again()
    scheduler.send_plan(plan_pb2.Plan(step=1))

    assert first.incarnation != second.incarnation
    assert scheduler.peer != old_peer
    assert scheduler.result(1).rows == b""


def test_malformed_frames_are_survived(scheduler: Scheduler) -> None:
    """Junk on the wire changes nothing."""
    scheduler.begin_again()

    for junk in (b"", b"\xff" * 40, b"junk"):
        assert send_to(scheduler.router, scheduler.peer, junk) is SendOutcome.SENT
    scheduler.router.send_multipart([scheduler.peer, b"two", b"frames"])
    scheduler.send_plan(prefill_plan())

    assert from_column(scheduler.result(1).rows).tolist() == [1]


@pytest.mark.parametrize(
    "bad",
    [
        plan_pb2.Plan(step=3),
        plan_pb2.Plan(step=2, leaves=to_column([3])),
        plan_pb2.Plan(step=2, chunk_rows=to_column([1]), chunk_lengths=to_column([1])),
        plan_pb2.Plan(step=2, leaves=b"abc"),
    ],
    ids=["gap", "unknown row", "chunk beyond the prompt", "malformed column"],
)
def test_a_bad_plan_brings_a_new_hello(scheduler: Scheduler, bad: plan_pb2.Plan) -> None:
    """A gap or a broken contract ends the epoch: the worker says Hello again and serves the next epoch."""
    hello = scheduler.begin_again()
    scheduler.send_plan(prefill_plan())
    scheduler.result(1)

    scheduler.send_plan(bad)
    again = scheduler.hello()
    scheduler.welcome()
    scheduler.send_plan(prefill_plan())

    assert again.incarnation != hello.incarnation
    assert again.reason == plan_pb2.HELLO_REASON_PROTOCOL_ERROR
    assert from_column(scheduler.result(1).rows).tolist() == [1]


@pytest.mark.every(3)
def test_lines_of_the_log_say_which_epoch_and_step(router: "zmq.Socket[bytes]", checkpoint: Path) -> None:
    """An error in a step is logged with the step's number, so that the scheduler's log leads to it."""
    scheduler = Scheduler(router, start_worker(router, checkpoint, "--worker-id=logged"))
    scheduler.hello(START_MS)
    scheduler.welcome()
    scheduler.send_plan(prefill_plan())
    scheduler.result(1)
    scheduler.send_plan(plan_pb2.Plan(step=2, leaves=to_column([3])))
    scheduler.hello()
    scheduler.process.kill()
    _, errors = scheduler.process.communicate()

    (lost,) = (line for line in map(json.loads, errors.splitlines()) if line["event"] == "session lost; reconnecting")
    assert (lost["epoch"], lost["step"]) == (f"{scheduler.epoch:016x}", 2)
    assert "a row is not in use" in lost["reason"]


def test_silence_brings_a_new_hello(scheduler: Scheduler) -> None:
    """A scheduler that says nothing for as long as Welcome allowed is greeted again."""
    hello = scheduler.begin_again(silence_ms=300)

    again = scheduler.hello()

    assert again.incarnation != hello.incarnation
    assert again.reason == plan_pb2.HELLO_REASON_SESSION_LOST


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_worker_in_order(
    router: "zmq.Socket[bytes]", checkpoint: Path, number: signal.Signals
) -> None:
    """The step in hand is answered, Goodbye follows, the exit code is 0."""
    scheduler = Scheduler(router, start_worker(router, checkpoint, "--worker-id=stopped"))
    scheduler.hello(START_MS)
    scheduler.welcome()
    scheduler.send_plan(prefill_plan())
    scheduler.result(1)

    scheduler.process.send_signal(number)

    assert scheduler.receive().goodbye.reason == "shutting down"
    _, errors = scheduler.process.communicate(timeout=30)
    assert scheduler.process.returncode == 0, errors


def test_a_signal_while_waiting_for_a_scheduler_is_no_failure(checkpoint: Path) -> None:
    """A worker that was never welcomed ends with exit code 0 and no traceback."""
    with bound_router() as router:
        process = start_worker(router, checkpoint)
        Scheduler(router, process).hello(START_MS)
    process.send_signal(signal.SIGTERM)

    _, errors = process.communicate(timeout=30)

    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.every(3)
def test_two_workers_without_a_name_are_two_workers(checkpoint: Path) -> None:
    """Workers without a name use host and process id, so that none replaces another."""
    with bound_router() as router:
        processes = [start_worker(router, checkpoint) for _ in range(2)]
        try:
            hellos = [Scheduler(router, process).hello(START_MS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()

    assert {hello.worker_id for hello in hellos} == {f"{platform.node()}-{process.pid}" for process in processes}


@pytest.mark.every(3)
def test_a_name_that_is_too_long_is_one_line(router: "zmq.Socket[bytes]", checkpoint: Path) -> None:
    """The scheduler would drop such a Hello for ever; the worker does not start."""
    process = start_worker(router, checkpoint, "--worker-id=" + "ä" * 33)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert errors == "quire worker: worker_id: 66 bytes exceed the limit of 64; use a shorter name\n"


@pytest.mark.every(3)
def test_a_refused_worker_exits_with_the_reason(router: "zmq.Socket[bytes]", checkpoint: Path) -> None:
    """One line on stderr says why; the exit code is 1."""
    scheduler = Scheduler(router, start_worker(router, checkpoint, "--worker-id=refused"))
    scheduler.hello(START_MS)

    scheduler.send(plan_pb2.SchedulerMessage(refused=plan_pb2.Refused(reason="another model is served here")))

    _, errors = scheduler.process.communicate(timeout=30)
    assert scheduler.process.returncode == 1
    assert errors.splitlines()[-1] == "quire worker: refused by the scheduler: another model is served here"


@pytest.mark.every(3)
def test_a_model_that_cannot_be_served_is_one_line(router: "zmq.Socket[bytes]", tmp_path: Path) -> None:
    """The process ends with exit code 1 and nothing on stderr but the reason."""
    (tmp_path / "config.json").write_text('{"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}')

    process = start_worker(router, tmp_path)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert errors.count("\n") == 1, errors
    assert errors.startswith("quire worker: model: RwkvForCausalLM is not supported: ")
