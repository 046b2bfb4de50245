"""Attackers that pass a scheduler's authentication: a false worker and a false front end, in a whole service."""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from google.protobuf.message import Message

from checks.chaos.adversaries.base import BATCH, PATIENCE_S, PROMPT, Adversary
from checks.chaos.mutation import Frames
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import serve
from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire import Client
from quire.admin.v1 import admin_pb2
from shared.columns import to_column
from shared.frames import LINK_MAX_MESSAGE, LINK_VERSIONS, PLAN_MAX_MESSAGE, PLAN_VERSIONS
from shared.sockets import connect_dealer


class _InService(Adversary):
    """Attacks the scheduler in a whole service, whose correct client requests greedy tokens."""

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
        self._max_model_len = self._client.get_model().max_model_len
        self._number = 0
        self._answer: list[int] | None = None

    @property
    def pid(self) -> int:  # type: ignore[override]
        """Process ID of the scheduler."""
        return self._served.pid("scheduler")

    def connect(self, role: str, max_message: int) -> "zmq.Socket[bytes]":
        """Connect a new peer."""
        self._number += 1
        name = f"false-{self._number}/{self._number}".encode()
        return connect_dealer(self.context, self.addresses[role], identity=name, max_message=max_message)

    def check(self) -> None:
        """Assert that a client gets the same tokens as at the start."""
        # The smallest worker limits the sequence length. A fake worker counts until the scheduler detects its
        # disconnect.
        end = time.monotonic() + PATIENCE_S
        while self._client.get_model().max_model_len != self._max_model_len and time.monotonic() < end:
            time.sleep(0.01)
        # A request may have been assigned to a fake worker, whose step must time out first.
        completion = self._client.generate(
            token_ids=PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True, timeout=PATIENCE_S
        ).result()
        tokens = list(completion.token_ids)
        assert self._answer in (None, tokens), "the answer is another one"
        self._answer = tokens
        died = [line for line in self._served.log_lines() if line["event"] == "process died"]
        assert not died, died

    def print_log(self) -> None:
        """Print the end of the service's log."""
        print("".join(self._served.log.read_text().splitlines(keepends=True)[-60:]), file=sys.stderr)

    def close(self) -> None:
        """Stop the service."""
        self.context.destroy(linger=0)
        self._stack.close()


class FalseWorker(_InService):
    """Registers as a worker, receives requests, and responds with malformed results."""

    def batch(self) -> int:
        """Send one connection's frames, the last of which the scheduler has certainly read."""
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
        # The refusal proves that all earlier frames were read.
        last = plan_pb2.Hello(protocol_version=7_000_000, worker_id="false")
        _ask(socket, plan_pb2.WorkerMessage(hello=last), lambda frame: b"7000000" in frame)
        socket.close(linger=0)
        return BATCH

    def _listen(self, socket: "zmq.Socket[bytes]", frames: Frames, right: list[Message]) -> None:
        """Read the epoch and plans, so that frames can match them."""
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
        """Return the model as the core describes it to front ends, so that a fake worker can claim to serve it."""
        socket = self.connect("frontends", LINK_MAX_MESSAGE)
        hello = link_pb2.FrontendHello(protocol_version=LINK_VERSIONS.newest, frontend_id="asks", incarnation=1)
        model = link_pb2.CoreMessage.FromString(_ask(socket, link_pb2.FrontendMessage(hello=hello))).state.model
        socket.close(linger=0)
        return plan_pb2.ModelInfo(
            name=model.name,
            architecture=model.architecture,
            fingerprint=model.fingerprint,
            max_model_len=1024,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            eos_token_ids=model.eos_token_ids,
        )


class FalseFrontend(_InService):
    """Registers as a front end and sends malformed submissions, cancels, credits and questions.

    Its streams run on a worker.
    """

    def batch(self) -> int:
        """Send one connection's frames, the last of which the scheduler has certainly read."""
        socket = self.connect("frontends", LINK_MAX_MESSAGE)
        # After the Goodbye, the core does not know the peer and ignores its frames.
        frames = Frames(link_pb2.FrontendMessage, self.rng, {"goodbye": False})
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
        question = _operator_request(7_000_000, admin_pb2.GetSchedulerStateRequest())
        message = link_pb2.FrontendMessage(hello=hello, operator_requests=[question])
        _ask(socket, message, lambda frame: _answers(frame, 7_000_000))
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
        # Send no drains, because this front end may act as an operator and would stop the honest worker.
        looks = [
            _operator_request(1, admin_pb2.ListRequestsRequest(limit=5)),
            _operator_request(2, admin_pb2.GetStoryRequest(request_id="r")),
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
        """Check as the base class does, after resuming workers that the false front end has drained."""
        socket = self.connect("frontends", LINK_MAX_MESSAGE)
        hello = link_pb2.FrontendHello(protocol_version=LINK_VERSIONS.newest, frontend_id="mends", incarnation=1)
        resume = _operator_request(1, admin_pb2.ResumeWorkerRequest(worker_id="worker-0"))
        message = link_pb2.FrontendMessage(hello=hello, operator_requests=[resume])
        _ask(socket, message, lambda frame: _answers(frame, 1))
        socket.close(linger=0)
        super().check()


def _ask(socket: "zmq.Socket[bytes]", question: Message, is_answer: Callable[[bytes], bool] = lambda _: True) -> bytes:
    """Return the first response frame; repeat the question every few seconds.

    An oversized frame closes the connection, and later frames are lost.
    """
    """Return the first frame that is a response.

    Repeat the request every few seconds: an oversized frame closes the connection, and all frames behind it are lost.
    """
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        socket.send(question.SerializeToString())
        while socket.poll(3000):
            if is_answer(frame := socket.recv()):
                return frame
    raise AssertionError("no answer")


def _operator_request(number: int, call: Message) -> link_pb2.OperatorRequest:
    request = link_pb2.OperatorRequest(number=number)
    request.call.Pack(call)
    return request


def _answers(frame: bytes, number: int) -> bool:
    replies = link_pb2.CoreMessage.FromString(frame).operator_replies
    return any(reply.number == number for reply in replies)
