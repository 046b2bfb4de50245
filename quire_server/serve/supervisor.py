"""Keeps a set of child processes alive, and stops them in order.

Start: all processes at once; they find each other. Death: a log line, a delay, a restart (`restarts` decides). Hang
(`watchdog`): the process is killed and then treated like any other death. Stop: front ends first, which finish their
running requests, then workers, then the scheduler, each within its grace period. The supervisor does not depend on the
processes' behaviour, except that a front end prints its addresses.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire_server.serve.child import Child
from quire_server.serve.last_words import LastWords
from quire_server.serve.layout import ChildSpec, Role, child_environment
from quire_server.serve.output import LogForwarder
from quire_server.serve.restarts import GiveUp, RestartPolicy
from quire_server.serve.watchdog import CHECK_INTERVAL_S, Watchdog
from shared import pulse
from shared.cpu_time import cpu_seconds

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

END_ORDER = (Role.FRONTEND, Role.WORKER, Role.SCHEDULER)

_NOT_STARTED = 127
"""Exit code of a process that could not be started, as in a shell."""
_LISTENING = re.compile(r"listening grpc=(\S+) http=(\S+)$")


class ServeError(Exception):
    """The service cannot start; the message is one line."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of a service, as HOST:PORT."""

    grpc: str
    http: str


@dataclass(slots=True)
class _Slot:
    """A supervised process and its current child."""

    spec: ChildSpec
    child: Child | None = None
    deaths: int = 0
    has_listened: bool = False
    """Whether the current child is a front end that listens."""
    has_hung: bool = False
    """Whether the supervisor has killed the current child, because it made no progress."""
    last_words: LastWords = field(default_factory=lambda: LastWords(""))
    """Output of the current child on stderr."""
    listening: "asyncio.Future[Addresses]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Supervisor:
    """A service's child processes. Use within one event loop, in the main thread."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        grace_s: Mapping[Role, float],
        pulse_dir: Path,
        watchdog_s: float = 0.0,
        policy: RestartPolicy | None = None,
        log_level: str = "debug",
    ) -> None:
        self._slots = [_Slot(spec) for spec in specs]
        self._grace_s = grace_s
        self._pulse_dir = pulse_dir
        self._watchdog_s = watchdog_s
        self._policy = policy or RestartPolicy()
        self._environment = child_environment(os.environ, os.getpid())
        self._stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._output = LogForwarder(sys.stderr, log_level)
        self.was_ready = False
        """Set by the owner when the service is ready; from then on children are always restarted."""
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set to the reason when the service cannot start."""

    def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(slot), name=slot.spec.name) for slot in self._slots]

    async def listening(self) -> Addresses:
        """Wait until every front end listens; return the addresses."""
        frontends = [slot.listening for slot in self._slots if slot.spec.role is Role.FRONTEND]
        return (await asyncio.gather(*map(asyncio.shield, frontends)))[0]

    async def stop(self) -> None:
        """Stop every process in order."""
        self._stopping.set()
        for role in END_ORDER:
            slots = [slot for slot in self._slots if slot.spec.role is role]
            await asyncio.gather(*(slot.child.end(self._grace_s[role]) for slot in slots if slot.child))
        await asyncio.gather(*self._keepers)

    def kill(self) -> None:
        """Kill every process; `stop` then has nothing to wait for."""
        self._stopping.set()
        for slot in self._slots:
            if slot.child:
                slot.child.kill()

    def cpu_seconds(self) -> dict[str, float]:
        """Return each running process's CPU time in seconds, by name; a restarted process begins at 0."""
        used = {}
        for slot in self._slots:
            if slot.child:
                with contextlib.suppress(OSError):  # The process may already have exited.
                    used[slot.spec.name] = cpu_seconds(slot.child.pid)
        return used

    async def _keep(self, slot: _Slot) -> None:
        while not self._stopping.is_set():
            slot.last_words = LastWords(f"quire {slot.spec.role.value}: ")
            slot.has_listened = slot.has_hung = False
            started = time.monotonic()
            pulse_file = self._pulse_dir / f"{slot.spec.name}.pulse"
            watchdog = Watchdog(pulse_file, self._watchdog_s)
            try:
                slot.child = Child(
                    slot.spec,
                    {**self._environment, pulse.ENVIRONMENT: str(pulse_file)},
                    on_stdout=lambda line: self._on_stdout(slot, line),
                    on_stderr=lambda line: self._on_stderr(slot, line),
                )
                exit_code = await self._watch(slot, slot.child, watchdog)
            except OSError as error:  # The system lacks processes, memory or file descriptors.
                slot.last_words.add(str(error))
                exit_code = _NOT_STARTED
            if self._stopping.is_set():
                return
            has_served = watchdog.has_served or slot.has_listened
            await self._after_death(slot, exit_code, time.monotonic() - started, has_served=has_served)

    async def _watch(self, slot: _Slot, child: Child, watchdog: Watchdog) -> int:
        """Wait for the child's end, and kill it when it hangs."""
        ended = asyncio.ensure_future(child.wait())
        while True:
            done, _ = await asyncio.wait({ended}, timeout=CHECK_INTERVAL_S)
            if done:
                return ended.result()
            if watchdog.check() and not self._stopping.is_set():
                _log().error("process hangs", process=slot.spec.name, after_s=self._watchdog_s)
                slot.has_hung = True
                child.kill()

    async def _after_death(self, slot: _Slot, exit_code: int, lived_s: float, *, has_served: bool) -> None:
        # Count only deaths before the first completed work as failures to start.
        slot.deaths = 1 if has_served or lived_s >= self._policy.steady_after_s else slot.deaths + 1
        decision = self._policy.after_death(
            exit_code=exit_code, lived_s=lived_s, deaths=slot.deaths, was_ready=self.was_ready
        )
        how = how_it_ended(exit_code)
        reason = why_it_ended(exit_code, slot.last_words.reason, has_hung=slot.has_hung)
        if isinstance(decision, GiveUp):
            if not self.failed.done():
                self.failed.set_result(f"{slot.spec.name} ended ({how}): {reason or 'no error message'}")
            await self._stopping.wait()
            return
        _log().warning(
            "process died",
            process=slot.spec.name,
            how=how,
            reason=reason,
            restart_in_s=decision.delay_s,
        )
        try:
            await asyncio.wait_for(self._stopping.wait(), decision.delay_s)
        except TimeoutError:
            return

    def _on_stdout(self, slot: _Slot, line: str) -> None:
        match = _LISTENING.match(line)
        if match is None:
            # The supervisor's own stdout is reserved for the ready line.
            self._output.forward(line)
            return
        slot.has_listened = True
        if not slot.listening.done():
            slot.listening.set_result(Addresses(*match.groups()))

    def _on_stderr(self, slot: _Slot, line: str) -> None:
        if not line.strip():
            return
        # Log the command's final error line once, as the reason for its death.
        if not slot.last_words.add(line):
            self._output.forward(line)


def _log() -> "FilteringBoundLogger":
    """Return the logger. Import its library late, because the import takes longer than starting all processes."""
    from shared.logging import get_logger

    return get_logger()


def how_it_ended(exit_code: int) -> str:
    """Describe an exit code, negative for a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    names = {each.value: each.name for each in signal.Signals}  # Real-time signals have no names.
    return f"killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def why_it_ended(exit_code: int, last_words: str, *, has_hung: bool) -> str:
    """Return the reason for the end of a process; empty if it is not known.

    A process that a signal kills cannot say why, so what it wrote last is only added.

    Args:
        exit_code: exit code of the process, negative for a signal.
        last_words: what the process wrote last, from `LastWords.reason`.
        has_hung: whether the supervisor killed the process, because it made no progress.
    """
    if exit_code >= 0:
        return last_words
    if has_hung:
        reason = "it made no progress, so quire serve killed it"
    elif exit_code == -signal.SIGKILL:
        reason = "killed by SIGKILL, possibly because memory ran out; see the kernel's log (dmesg)"
    else:
        reason = how_it_ended(exit_code)
    return f"{reason}; its last log line was: {last_words}" if last_words else reason
