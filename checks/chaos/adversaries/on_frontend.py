"""A core that sends malformed messages to a real front end."""

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from checks.chaos.adversaries.base import BATCH, PATIENCE_S, PROMPT, Adversary
from checks.chaos.mutation import Frames
from measure.frontend.echo_core import EchoCore
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import QUIRE, ROOT
from protos.quire.link.v1 import link_pb2
from quire import AsyncClient, Client
from quire.errors import QuireError
from shared.columns import to_column
from shared.frames import MalformedFrameError
from shared.sockets import SendOutcome, send_to


class FalseCore(Adversary):
    """A core that echoes prompts and sends malformed messages to a real front end."""

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
        """Send frames while streams begin and end. The frames must not disturb the streams."""
        asyncio.run(self._among_streams())
        return BATCH

    def check(self) -> None:
        """Assert that a prompt is echoed."""
        with Client(self._target) as client:
            end = time.monotonic() + PATIENCE_S
            name = self._core.rename()
            while client.get_model().name != name and time.monotonic() < end:
                self._core.state_again()
                time.sleep(0.01)
            completion = client.generate(
                token_ids=PROMPT, max_tokens=15, temperature=0.0, ignore_eos=True, timeout=PATIENCE_S
            ).result()
        assert list(completion.token_ids) == PROMPT * 3

    def close(self) -> None:
        """Stop the front end and the core."""
        self._process.terminate()
        code = self._process.wait(PATIENCE_S)
        assert code == 0, f"exit code {code}"
        self._stderr.close()
        self._core.kill()

    def print_log(self) -> None:
        """Print the end of the front end's log."""
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
    """An echo core in a thread that sends the given messages to every front end."""

    def __init__(self, address: str, model: link_pb2.ServedModel) -> None:
        super().__init__(address, model, step_interval_s=0.002)
        self._num_names = 0
        self._sayings: deque[bytes] = deque()
        self._silent = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, payloads: list[bytes]) -> None:
        """Queue messages to send."""
        self._silent.clear()
        self._sayings.extend(payloads)

    def said(self) -> None:
        """Wait until everything is sent."""
        assert self._silent.wait(PATIENCE_S), "the front end takes nothing"

    def rename(self) -> str:
        """Rename the model. A front end that reports the new name has read all earlier frames."""
        self._num_names += 1
        self._state.model.name = f"echo-{self._num_names}"
        return self._state.model.name

    def state_again(self) -> None:
        """Send the correct state to front ends."""
        self.say([link_pb2.CoreMessage(incarnation=self.incarnation, state=self._state).SerializeToString()])
        self.said()

    def numbers(self) -> list[int]:
        """Return the numbers of the live streams."""
        return [number for frontend in list(self._frontends.values()) for number in list(frontend.streams)]

    def kill(self) -> None:
        """Stop the thread."""
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
