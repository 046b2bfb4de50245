"""A scheduler that sends malformed plans to a real worker."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import zmq
from google.protobuf.message import Message

from checks.chaos.adversaries.base import BATCH, PATIENCE_S, PROMPT, Adversary
from checks.chaos.campaign import HOOKS
from checks.chaos.mutation import Frames
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import QUIRE, ROOT
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.frames import PLAN_MAX_MESSAGE
from shared.sockets import SendOutcome, bind_router, endpoint, receive_from, send_to
from worker_svc.interface.limits import Limits
from worker_svc.link.session import Event, Lost, PlanArrived, RefusedForGood, Session, Welcomed


class FalseScheduler(Adversary):
    """Welcomes a real worker and sends it malformed plans.

    Frames that end a session (see `Session`) are sent last, after the worker has responded to a correct plan and thus
    has read all earlier frames. Refusals are not sent, because they make a worker exit.
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
                # A worker may send any number of Hellos.
                env=os.environ | {"PYTHONPATH": str(HOOKS), "CHAOS_EAGER": "1", "QUIRE_LOG_LEVEL": "error"},
                stderr=stderr,
            )  # fmt: skip
        self.pid = self._process.pid
        self._epoch = 0
        self._peer = b""
        self._answer: bytes | None = None
        self._limits = self._await_hello()

    def batch(self) -> int:
        """Send the frames of many sessions."""
        count = 0
        while count < BATCH:
            count += self._session()
        return count

    def check(self) -> None:
        """Assert that a prompt has the same first token as at the start."""
        self._open(max_in_flight=2, silence_ms=60_000)
        result = self._good_plan()
        assert self._answer in (None, result.tokens), "the answer is another one"
        self._answer = result.tokens
        self._end()

    def close(self) -> None:
        """Stop the worker."""
        self._process.terminate()
        code = self._process.wait(PATIENCE_S)
        assert code == 0, f"exit code {code}"
        self._context.destroy(linger=0)

    def print_log(self) -> None:
        """Print the end of the worker's log."""
        print("".join(self._log.read_text().splitlines(keepends=True)[-40:]), file=sys.stderr)

    def _session(self) -> int:
        """Send the frames of one incarnation."""
        self._begin_epoch()
        shadow, sent, welcomed_well = Session(0.0, self._limits), 0, False
        frames = Frames(plan_pb2.SchedulerMessage, self._rng, {"epoch": self._epoch})
        welcome = plan_pb2.Welcome(max_in_flight=2, silence_ms=60_000)
        right: list[Message] = [plan_pb2.SchedulerMessage(epoch=self._epoch, welcome=welcome)]
        last: Event | None = None
        for number in range(30):
            # An earlier mutated frame may have welcomed some workers.
            is_time = number == 5 and shadow.epoch == 0
            frame = right[0].SerializeToString() if is_time else frames.draw(right)
            last = shadow.receive(frame, 0.0)
            if isinstance(last, RefusedForGood):
                continue
            if isinstance(last, Lost) and welcomed_well:
                self._good_plan()  # All earlier frames were read.
            if not self._send(frame):
                assert not welcomed_well, "the worker's connection is gone"
                break  # welcomed only briefly
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
        """Return several variants of a valid first plan, and the other messages."""
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
                block_tables=[to_column([row])], request_id="r",
                sampling=plan_pb2.SamplingParams(top_p=1).SerializeToString(),
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
        self._begin_epoch()
        welcome = plan_pb2.Welcome(max_in_flight=max_in_flight, silence_ms=silence_ms)
        self._send(plan_pb2.SchedulerMessage(epoch=self._epoch, welcome=welcome).SerializeToString())

    def _begin_epoch(self) -> None:
        # An earlier mutated frame may have set the epoch to any 64-bit number except 0.
        self._epoch = (self._epoch + 1) % (1 << 64) or 1

    def _end(self) -> None:
        """Make the worker start a new session, unless it has done so itself."""
        self._send(plan_pb2.SchedulerMessage(unknown=plan_pb2.Unknown()).SerializeToString())
        self._await_hello()

    def _await_hello(self) -> Limits:
        """Return the worker's limits."""
        while (message := self._receive()).WhichOneof("body") != "hello":
            pass
        hello = message.hello
        return Limits(
            max_rows=hello.max_rows,
            max_tokens_per_step=hello.max_tokens_per_step,
            max_model_len=hello.model.max_model_len,
            block_size=hello.block_size,
            num_blocks=hello.num_blocks,
            vocab_size=hello.model.vocab_size,
            num_host_blocks=hello.num_host_blocks,
            hidden_size=hello.model.hidden_size,
        )

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
