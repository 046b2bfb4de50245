"""Client of the process that compiles grammars on trial (`services.grammars.trial_process`).

The first grammar starts the process. The process has two lanes, each of which runs one trial at a time. Trials in the
first lane have a small CPU time limit. A grammar that exceeds this limit is tried again in the second lane. Cheap
grammars therefore never wait long for expensive ones, and no cost estimate is needed.
"""

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from protos.quire.link.v1 import link_pb2
from services.access.shares import Turns
from services.grammars.trial_process import ANSWER, READY, TRIAL, Verdict

START_TIMEOUT_S = 60.0
"""Maximum time for the process to read the tokenizer, seconds."""


class TrialUnavailableError(Exception):
    """The process cannot be started, or has exited. A new process may run the next trial."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial."""

    verdict: Verdict
    said: bytes
    """The grammar in the workers' format if it is usable, or the reason for its rejection. Otherwise empty."""


class Lane:
    """Runs one trial at a time; principals wait in turn."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turns = Turns()

    async def run(self, grammar: bytes, cpu_s: float, principal: str) -> Trial:
        """Compile a serialized quire.v1.Grammar within `cpu_s` seconds of CPU time.

        If the caller is cancelled while it waits, no trial is started.

        Raises:
            TrialUnavailableError: see the class.
        """
        await self._turns.acquire(principal)
        work = asyncio.ensure_future(self._exchange(grammar, cpu_s))
        work.add_done_callback(self._ended)
        # Finish the trial even if the caller is cancelled. Otherwise the next caller would receive this result.
        return await asyncio.shield(work)

    async def _exchange(self, grammar: bytes, cpu_s: float) -> Trial:
        try:
            self._writer.write(TRIAL.pack(cpu_s, len(grammar)) + grammar)
            await self._writer.drain()
            verdict, length = ANSWER.unpack(await self._reader.readexactly(ANSWER.size))
            return Trial(Verdict(verdict), await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError):
            raise TrialUnavailableError from None

    def _ended(self, work: "asyncio.Future[Trial]") -> None:
        self._turns.release()
        if not work.cancelled():
            work.exception()  # Retrieve the exception, because the caller may have been cancelled.

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


@dataclass(frozen=True, slots=True)
class TrialCompiler:
    """A running process with its lanes. Created by `start_trial_compiler`."""

    fingerprint: str
    """Fingerprint of the model whose tokenizer is loaded."""
    quick: Lane
    long: Lane
    process: "subprocess.Popen[bytes]"

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self.process.poll() is None

    async def close(self) -> None:
        """Stop the process. Its children stop when their lanes are closed."""
        self.quick.close()
        self.long.close()
        self.process.terminate()
        await asyncio.to_thread(self.process.wait)


async def start_trial_compiler(tokenizer_file: Path, model: link_pb2.ServedModel) -> TrialCompiler:
    """Start the process and wait until it has read the tokenizer.

    Raises:
        TrialUnavailableError: see the class.
    """
    pairs = [socket.socketpair() for _ in range(2)]
    try:
        process = _start_process(tokenizer_file, model, [theirs for _, theirs in pairs])
    except OSError:
        for ours, _ in pairs:
            ours.close()
        raise TrialUnavailableError from None
    finally:
        for _, theirs in pairs:
            theirs.close()
    streams = [await asyncio.open_connection(sock=ours) for ours, _ in pairs]
    compiler = TrialCompiler(model.fingerprint, Lane(*streams[0]), Lane(*streams[1]), process)
    try:
        await asyncio.wait_for(streams[0][0].readexactly(len(READY)), START_TIMEOUT_S)
    except BaseException as error:
        await compiler.close()
        if isinstance(error, OSError | asyncio.IncompleteReadError | TimeoutError):
            raise TrialUnavailableError from None
        raise
    return compiler


def _start_process(
    tokenizer_file: Path, model: link_pb2.ServedModel, lanes: list[socket.socket]
) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).parents[2])
    descriptors = [lane.fileno() for lane in lanes]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "services.grammars.trial_process",
            str(tokenizer_file),
            str(model.vocab_size),
            ",".join(map(str, model.eos_token_ids)),
            *map(str, descriptors),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))},
    )
