"""Peers that have got in and mean harm, or are merely broken: one for each socket of `tests.chaos.frames`.

Each starts the process that it attacks, sends batches of frames (`batch`), and between them asks whether that process
still does its work (`check`).
"""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from google.protobuf.message import DecodeError, Message

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire import AsyncClient, Client
from quire.errors import QuireError
from services.echo_core import EchoCore
from shared.columns import to_column
from shared.frames import LINK_VERSIONS, PLAN_VERSIONS, MalformedFrameError
from shared.sockets import (
    LINK_MAX_MESSAGE,
    PLAN_MAX_MESSAGE,
    SendOutcome,
    bind_router,
    connect_dealer,
    endpoint,
    receive_from,
    send_to,
)
from tests.chaos.mutation import Frames
from tests.checkpoints import make_checkpoint
from tests.e2e.harness import QUIRE, ROOT, serve
from worker_svc.session import Event, Lost, PlanArrived, RefusedForGood, Session, Welcomed

PATIENCE_S = 60.0
BATCH = 1000
PROMPT = [20, 21, 22, 23, 24]
HOOKS = Path(__file__).parent / "hooks"


class Adversary(ABC):
    """Attacks one socket of one process."""

    pid: int
    """Of the process."""

    @abstractmethod
    def batch(self) -> int:
        """Sends frames; returns how many the process has read."""

    @abstractmethod
    def check(self) -> None:
        """Asserts that the process still does its work, and does it right."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything."""

    @abstractmethod
    def tell(self) -> None:
        """Prints what helps to understand a failure."""


class _InService(Adversary):
    """Attacks the scheduler of a whole service, whose honest client asks for greedy tokens."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.addresses = {role: f"ipc://{folder}/{role}" for role in ("workers", "frontends")}
        self._stack = contextlib.ExitStack()
        checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model")
        self._served = self._stack.enter_context(
            serve(
                checkpoint,
                "--dtype=float32",
                f"--worker-address={self.addresses['workers']}",
                f"--frontend-address={self.addresses['frontends']}",
                "--max-num-seqs=4",
                "--max-queued-requests=64",
                "--step-deadline-s=1",
                "--frontend-lease-s=3",
            )
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._client = self._stack.enter_context(Client(self._served.grpc))
        self._number = 0
        self._answer: list[int] | None = None

    @property
    def pid(self) -> int:  # type: ignore[override]
        """The scheduler."""
        return self._served.pid("scheduler")

    def connect(self, role: str, max_message: int) -> "zmq.Socket[bytes]":
        """A new peer."""
        self._number += 1
        name = f"false-{self._number}/{self._number}".encode()
        return connect_dealer(self.context, self.addresses[role], identity=name, max_message=max_message)

    def check(self) -> None:
        """A client gets the tokens that it got at first."""
        # A request may have been given to a false worker, whose step must be overdue first.
        completion = self._client.generate(
            token_ids=PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True, timeout=PATIENCE_S
        ).result()
        tokens = list(completion.token_ids)
        assert self._answer in (None, tokens), "the answer is another one"
        self._answer = tokens
        died = [line for line in self._served.log_lines() if line["event"] == "process died"]
        assert not died, died

    def tell(self) -> None:
        """The end of the service's log."""
        print("".join(self._served.log.read_text().splitlines(keepends=True)[-60:]), file=sys.stderr)

    def close(self) -> None:
        """Ends the service."""
        self.context.destroy(linger=0)
        self._stack.close()


class FalseWorker(_InService):
    """Says hello as a worker, is given requests, and answers with nonsense."""

    def batch(self) -> int:
        """One connection's frames, of which the last is known to have been read."""
        socket = self.connect("workers", PLAN_MAX_MESSAGE)
        frames = Frames(plan_pb2.WorkerMessage, self.rng, {})
        model = self._model()
        hello = plan_pb2.Hello(
            protocol_version=PLAN_VERSIONS.newest, worker_id="false", incarnation=1, model=model, block_size=16,
            num_blocks=64, max_rows=4, max_tokens_per_step=64, num_kv_groups=1,
        )  # fmt: skip
        right: list[Message] = [plan_pb2.WorkerMessage(hello=hello)]
        socket.send(right[0].SerializeToString())
        for number in range(BATCH):
            socket.send(frames.draw(right))
            if number % 25 == 0:
                self._listen(socket, frames, right)
        # Its refusal says that everything before it was read.
        last = plan_pb2.Hello(protocol_version=7_000_000, worker_id="false")
        socket.send(plan_pb2.WorkerMessage(hello=last).SerializeToString())
        _until(socket, lambda frame: b"7000000" in frame)
        socket.close(linger=0)
        return BATCH

    def _listen(self, socket: "zmq.Socket[bytes]", frames: Frames, right: list[Message]) -> None:
        """Learns epoch and plans, so that what is sent fits."""
        while socket.poll(0):
            message = plan_pb2.SchedulerMessage.FromString(socket.recv())
            match message.WhichOneof("body"):
                case "unknown":
                    socket.send(right[0].SerializeToString())
                case "welcome":
                    frames.fixed["epoch"] = message.epoch
                    goodbye = plan_pb2.Goodbye(reason="x")
                    compiling = plan_pb2.Compiling(expected_ms=10)
                    grammar = plan_pb2.GrammarReport(key=b"k", failure="f")
                    del right[1:]
                    right.append(plan_pb2.WorkerMessage(epoch=message.epoch, goodbye=goodbye))
                    right.append(plan_pb2.WorkerMessage(epoch=message.epoch, compiling=compiling))
                    right.append(plan_pb2.WorkerMessage(epoch=message.epoch, grammar=grammar))
                case "plan":
                    rows = to_column(sorted(admission.row for admission in message.plan.admissions) or [0])
                    result = plan_pb2.StepResult(step=message.plan.step, rows=rows, tokens=rows)
                    right += [plan_pb2.WorkerMessage(epoch=message.epoch, result=result)] * 3
                    if self.rng.random() < 0.7:
                        socket.send(right[-1].SerializeToString())

    def _model(self) -> plan_pb2.ModelInfo:
        """What the honest worker says of its model, so that a false one may serve beside it."""
        model = self._client.get_model()
        return plan_pb2.ModelInfo(
            name=model.name, fingerprint=self._fingerprint(), max_model_len=1024, vocab_size=384, eos_token_ids=[2]
        )

    def _fingerprint(self) -> str:
        """As the core tells front ends."""
        socket = self.connect("frontends", LINK_MAX_MESSAGE)
        hello = link_pb2.FrontendHello(protocol_version=LINK_VERSIONS.newest, frontend_id="asks", incarnation=1)
        socket.send(link_pb2.FrontendMessage(hello=hello).SerializeToString())
        state = link_pb2.CoreMessage.FromString(_until(socket, lambda _: True)).state
        socket.close(linger=0)
        return state.model.fingerprint


class FalseFrontend(_InService):
    """Says hello as a front end and submits, cancels, credits and asks for nonsense; its streams run on a worker."""

    def batch(self) -> int:
        """One connection's frames, of which the last is known to have been read."""
        socket = self.connect("frontends", LINK_MAX_MESSAGE)
        frames = Frames(link_pb2.FrontendMessage, self.rng, {})
        hello = link_pb2.FrontendHello(protocol_version=LINK_VERSIONS.newest, frontend_id="false", incarnation=1)
        right: list[Message] = [link_pb2.FrontendMessage(hello=hello), *self._right()]
        socket.send(right[0].SerializeToString())
        for number in range(BATCH):
            if number % 100 == 0:
                right[1:] = self._right()
                socket.send(right[1].SerializeToString())
            socket.send(frames.draw(right))
            while socket.poll(0):
                socket.recv()
        question = link_pb2.OperatorRequest(number=7_000_000, get_state=link_pb2.GetState())
        socket.send(link_pb2.FrontendMessage(hello=hello, operator_requests=[question]).SerializeToString())
        _until(socket, lambda frame: _answers(frame, 7_000_000))
        socket.close(linger=0)
        return BATCH

    def _right(self) -> Sequence[Message]:
        rng = self.rng
        submission = link_pb2.Submission(
            stream=rng.randrange(1, 50),
            request_id="r",
            token_ids=to_column([rng.randrange(384) for _ in range(rng.randrange(1, 40))]),
            num_prompt_tokens=1,
            max_tokens=rng.randrange(50, 200),
            sampling=plan_pb2.SamplingParams(top_p=1, temperature=rng.random()).SerializeToString(),
            credit=4000,
        )
        # A drain would stop the honest worker; operators may do that.
        looks = [
            link_pb2.OperatorRequest(number=1, list_requests=link_pb2.ListRequests(most=5)),
            link_pb2.OperatorRequest(number=2, get_story=link_pb2.GetStory(request_id="r")),
        ]
        return (
            link_pb2.FrontendMessage(submissions=[submission]),
            link_pb2.FrontendMessage(cancelled=to_column([1]), detached=to_column([2])),
            link_pb2.FrontendMessage(credit_streams=to_column([1, 2]), credit_bytes=to_column([100, 100])),
            link_pb2.FrontendMessage(stop_matches=[link_pb2.StopMatch(stream=3, keep_tokens=1)]),
            link_pb2.FrontendMessage(operator_requests=looks, snapshot_request=3),
            link_pb2.FrontendMessage(resume_questions=[link_pb2.ResumeQuestion(number=4, identity=b"i")]),
        )

    def check(self) -> None:
        """As before, with whatever the false front end has drained taken up again."""
        socket = self.connect("frontends", LINK_MAX_MESSAGE)
        hello = link_pb2.FrontendHello(protocol_version=LINK_VERSIONS.newest, frontend_id="mends", incarnation=1)
        resume = link_pb2.OperatorRequest(number=1, resume_worker=link_pb2.ResumeWorker(worker_id="worker-0"))
        socket.send(link_pb2.FrontendMessage(hello=hello, operator_requests=[resume]).SerializeToString())
        _until(socket, lambda frame: _answers(frame, 1))
        socket.close(linger=0)
        super().check()


class FalseScheduler(Adversary):
    """Welcomes a real worker and plans nonsense.

    Frames that end a session (`Session` says which) come last in theirs, so that the worker has read all before them:
    it answers a good plan in between. A refusal, which makes a worker exit as it should, is not sent.
    """

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng = rng
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = bind_router(self._context, f"ipc://{folder}/plans", max_message=PLAN_MAX_MESSAGE)
        checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model")
        self._log = folder / "log"
        with self._log.open("w") as stderr:
            self._process = subprocess.Popen(
                [*QUIRE, "worker", f"--worker-address={endpoint(self._router)}", f"--model={checkpoint}",
                 "--kv-cache-memory=8MiB", "--max-num-seqs=4", "--num-threads=1", "--dtype=float32"],
                cwd=ROOT,
                # It may say hello as often as it likes.
                env=os.environ | {"PYTHONPATH": str(HOOKS), "CHAOS_EAGER": "1", "QUIRE_LOG_LEVEL": "error"},
                stderr=stderr,
            )  # fmt: skip
        self.pid = self._process.pid
        self._epoch = 0
        self._peer = b""
        self._answer: bytes | None = None
        self._await_hello()

    def batch(self) -> int:
        """Frames of many sessions."""
        count = 0
        while count < BATCH:
            count += self._session()
        return count

    def check(self) -> None:
        """A prompt has the same first token as ever."""
        self._open(max_in_flight=2, silence_ms=60_000)
        result = self._good_plan()
        assert self._answer in (None, result.tokens), "the answer is another one"
        self._answer = result.tokens
        self._end()

    def close(self) -> None:
        """Ends the worker."""
        self._process.terminate()
        code = self._process.wait(PATIENCE_S)
        assert code == 0, f"exit code {code}"
        self._context.destroy(linger=0)

    def tell(self) -> None:
        """The end of the worker's log."""
        print("".join(self._log.read_text().splitlines(keepends=True)[-40:]), file=sys.stderr)

    def _session(self) -> int:
        """One incarnation's frames."""
        self._epoch += 1
        shadow, sent, welcomed_well = Session(0.0), 0, False
        frames = Frames(plan_pb2.SchedulerMessage, self._rng, {"epoch": self._epoch})
        welcome = plan_pb2.Welcome(max_in_flight=2, silence_ms=60_000)
        right: list[Message] = [plan_pb2.SchedulerMessage(epoch=self._epoch, welcome=welcome)]
        last: Event | None = None
        for number in range(30):
            # Some have been welcomed by a mutated frame before.
            is_time = number == 5 and shadow.epoch == 0
            frame = right[0].SerializeToString() if is_time else frames.draw(right)
            last = shadow.receive(frame, 0.0)
            if isinstance(last, RefusedForGood):
                continue
            if isinstance(last, Lost) and welcomed_well:
                self._good_plan()  # everything before it was read
            if not self._send(frame):
                assert not welcomed_well, "the worker's connection is gone"
                break  # welcomed for a moment only
            sent += 1
            if isinstance(last, Lost | PlanArrived):
                break
            if isinstance(last, Welcomed):
                welcomed_well = is_time
                self._epoch = frames.fixed["epoch"] = shadow.epoch
                right = self._right()
        self._end()
        return sent

    def _right(self) -> list[Message]:
        """A good first plan, in several ways, and the other messages."""
        prepare = plan_pb2.PrepareGrammar(key=b"k", grammar=plan_pb2.Grammar(regex="a+").SerializeToString())
        good = plan_pb2.SchedulerMessage(epoch=self._epoch, plan=self._plan())
        return [
            good,
            good,
            good,
            good,
            plan_pb2.SchedulerMessage(epoch=self._epoch, ping=plan_pb2.Ping()),
            plan_pb2.SchedulerMessage(epoch=self._epoch, prepare_grammar=prepare),
        ]

    def _plan(self) -> plan_pb2.Plan:
        admissions = [
            plan_pb2.Admission(
                row=row, generation=1, token_ids=to_column(PROMPT), num_prompt_tokens=len(PROMPT),
                block_tables=[to_column([row])], sampling=plan_pb2.SamplingParams(top_p=1), request_id="r",
            )
            for row in (0, 2)
        ]  # fmt: skip
        return plan_pb2.Plan(
            step=1,
            admissions=admissions,
            chunk_rows=to_column([0, 2]),
            chunk_lengths=to_column([len(PROMPT), len(PROMPT)]),
        )

    def _good_plan(self) -> plan_pb2.StepResult:
        message = plan_pb2.SchedulerMessage(epoch=self._epoch, plan=self._plan())
        self._send(message.SerializeToString())
        while True:
            answer = self._receive()
            assert answer.WhichOneof("body") != "hello", "the worker broke off"
            if answer.WhichOneof("body") == "result":
                return answer.result

    def _open(self, *, max_in_flight: int, silence_ms: int) -> None:
        self._epoch += 1
        welcome = plan_pb2.Welcome(max_in_flight=max_in_flight, silence_ms=silence_ms)
        self._send(plan_pb2.SchedulerMessage(epoch=self._epoch, welcome=welcome).SerializeToString())

    def _end(self) -> None:
        """Makes the worker begin again, if it has not done so by itself."""
        self._send(plan_pb2.SchedulerMessage(unknown=plan_pb2.Unknown()).SerializeToString())
        self._await_hello()

    def _await_hello(self) -> None:
        while self._receive().WhichOneof("body") != "hello":
            pass

    def _receive(self) -> plan_pb2.WorkerMessage:
        assert self._router.poll(int(PATIENCE_S * 1000)), "the worker says nothing"
        received = receive_from(self._router)
        assert received is not None
        self._peer, payload = received
        return plan_pb2.WorkerMessage.FromString(payload)

    def _send(self, frame: bytes) -> bool:
        while (outcome := send_to(self._router, self._peer, frame)) is SendOutcome.FULL:
            time.sleep(0.001)
        return outcome is SendOutcome.SENT


class FalseCore(Adversary):
    """A core that echoes prompts, and says much else beside it to a real front end."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng = rng
        checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model")
        model = link_pb2.ServedModel(
            name="echo", architecture="EchoForCausalLM", max_model_len=4096, vocab_size=384, eos_token_ids=[2],
            dtype="none", fingerprint="f" * 64,
        )  # fmt: skip
        self._core = _TalkativeCore(f"ipc://{folder}/core", model)
        self._log = folder / "log"
        self._stderr = self._log.open("w")
        self._process = subprocess.Popen(
            [*QUIRE, "frontend", f"--frontend-address={self._core.address}", f"--model={checkpoint}",
             "--grpc-port=0", "--http-port=0"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=self._stderr, text=True,
        )  # fmt: skip
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._target = self._process.stdout.readline().split("grpc=")[1].split()[0]

    def batch(self) -> int:
        """Frames that live streams, which come and go, must bear."""
        asyncio.run(self._among_streams())
        return BATCH

    def check(self) -> None:
        """A prompt is echoed."""
        with Client(self._target) as client:
            end = time.monotonic() + PATIENCE_S
            while client.get_model().max_model_len != 4096 and time.monotonic() < end:
                self._core.state_again()
                time.sleep(0.01)
            completion = client.generate(
                token_ids=PROMPT, max_tokens=15, temperature=0.0, ignore_eos=True, timeout=PATIENCE_S
            ).result()
        assert list(completion.token_ids) == PROMPT * 3

    def close(self) -> None:
        """Ends front end and core."""
        self._process.terminate()
        code = self._process.wait(PATIENCE_S)
        assert code == 0, f"exit code {code}"
        self._stderr.close()
        self._core.kill()

    def tell(self) -> None:
        """The end of the front end's log."""
        print("".join(self._log.read_text().splitlines(keepends=True)[-40:]), file=sys.stderr)

    async def _among_streams(self) -> None:
        done = asyncio.Event()

        async def one_after_another(client: AsyncClient) -> None:
            while not done.is_set():
                with contextlib.suppress(QuireError):
                    stream = client.generate(
                        token_ids=PROMPT, max_tokens=400, temperature=0.0, ignore_eos=True, timeout=PATIENCE_S
                    )
                    async for _ in stream:
                        if done.is_set():
                            break

        async with AsyncClient(self._target) as client, asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(one_after_another(client))
            frames = Frames(link_pb2.CoreMessage, self._rng, {"incarnation": self._core.incarnation})
            for begin in range(0, BATCH, 50):
                payloads = [frames.draw(self._right()) for _ in range(begin, begin + 50)]
                await asyncio.to_thread(self._core.say, payloads)
            done.set()
        await asyncio.to_thread(self._core.said)

    def _right(self) -> Sequence[Message]:
        incarnation, numbers = self._core.incarnation, self._core.numbers() or [1]
        number = self._rng.choice(numbers)
        column = to_column([number])
        make = link_pb2.CoreMessage
        return (
            make(incarnation=incarnation, streams=column, first_indices=to_column([0]), tokens=to_column([30])),
            make(incarnation=incarnation, ends=[link_pb2.StreamEnd(stream=number, reason=link_pb2.END_REASON_LENGTH)]),
            make(incarnation=incarnation, state=link_pb2.ServiceState(ready=True)),
            make(incarnation=incarnation, scores=[link_pb2.StreamScores(stream=number, scores=b"")]),
            make(incarnation=incarnation, snapshot=link_pb2.Snapshot(request=1)),
        )


class _TalkativeCore(EchoCore):
    """An echo core in a thread, which sends what it is given to every front end."""

    def __init__(self, address: str, model: link_pb2.ServedModel) -> None:
        super().__init__(address, model, step_interval_s=0.002)
        self._sayings: deque[bytes] = deque()
        self._silent = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, payloads: list[bytes]) -> None:
        """Sends these soon."""
        self._silent.clear()
        self._sayings.extend(payloads)

    def said(self) -> None:
        """Waits until everything was sent."""
        assert self._silent.wait(PATIENCE_S), "the front end takes nothing"

    def state_again(self) -> None:
        """Tells front ends the true state."""
        self.say([link_pb2.CoreMessage(incarnation=self.incarnation, state=self._state).SerializeToString()])
        self.said()

    def numbers(self) -> list[int]:
        """Live streams."""
        return [number for frontend in list(self._frontends.values()) for number in list(frontend.streams)]

    def kill(self) -> None:
        """Ends."""
        self._stop.set()
        self._thread.join()
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            while self._sayings and self._frontends:
                payload = self._sayings[0]
                outcomes = {send_to(self._socket, peer, payload) for peer in list(self._frontends)}
                if SendOutcome.FULL in outcomes:
                    break
                self._sayings.popleft()
            if not self._sayings:
                self._silent.set()
            with contextlib.suppress(DecodeError, MalformedFrameError):
                self.step(timeout_ms=2)


def _until(socket: "zmq.Socket[bytes]", holds: Callable[[bytes], bool]) -> bytes:
    """The next frame for which `holds`."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if socket.poll(1000) and holds(frame := socket.recv()):
            return frame
    raise AssertionError("no answer")


def _answers(frame: bytes, number: int) -> bool:
    replies = link_pb2.CoreMessage.FromString(frame).operator_replies
    return any(reply.number == number for reply in replies)
