"""What the supervisor promises, with scripted children in place of the services."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path

import psutil
import pytest

from quire_server.serve import lifeline
from quire_server.serve.layout import ChildSpec, Role
from quire_server.serve.output import LogForwarder
from quire_server.serve.restarts import RestartPolicy
from quire_server.serve.supervisor import Addresses, Supervisor, how_it_ended, why_it_ended

GRACE_S = {Role.FRONTEND: 10.0, Role.WORKER: 10.0, Role.SCHEDULER: 10.0}
QUICK = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.01)

# The process writes its start and its end to a file, and exits on SIGTERM. It ignores SIGINT, as the parents of our
# services expect.
OBEDIENT = """
import os, signal, sys
journal = open(sys.argv[1], "a", buffering=1)
def end(*_):
    journal.write(f"end {sys.argv[2]}\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
journal.write(f"start {sys.argv[2]} {os.getpid()}\\n")
print("listening grpc=h:1 http=h:2", flush=True)
while True:
    signal.pause()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("listening grpc=h:1 http=h:2", flush=True)
while True:
    signal.pause()
"""
FAILING = "import sys; print('quire worker: model: there is none', file=sys.stderr); sys.exit(3)"


def spec(name: str, role: Role, code: str, *arguments: object) -> ChildSpec:
    """Return a child that runs Python code."""
    return ChildSpec(name, role, (sys.executable, "-c", code, *map(str, arguments)))


def run(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a scenario with a time limit."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    before = _live_children()  # Other tests in this process may share a service.
    asyncio.run(bounded())
    assert _live_children() <= before


def _live_children() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def written_to(journal: Path) -> list[str]:
    """Return the lines of the journal."""
    return journal.read_text().splitlines() if journal.exists() else []


async def lines(journal: Path, count: int) -> list[str]:
    """Waits until the journal has so many lines."""
    while True:
        if len(written := written_to(journal)) >= count:
            return written
        await asyncio.sleep(0.01)


def starts(journal: Iterable[str]) -> list[str]:
    """Return the starts among the lines of the journal."""
    return [line for line in journal if line.startswith("start")]


def test_children_end_front_ends_first_and_scheduler_last(tmp_path: Path) -> None:
    """Requests can finish, because front ends end before workers, and workers before the scheduler."""

    async def scenario() -> None:
        journal = tmp_path / "journal"
        specs = [
            spec(role.value, role, OBEDIENT, journal, role.value)
            for role in (Role.SCHEDULER, Role.WORKER, Role.FRONTEND)
        ]
        supervisor = Supervisor(specs, pulse_dir=tmp_path, grace_s=GRACE_S)
        supervisor.start()
        assert await supervisor.listening() == Addresses("h:1", "h:2")
        await lines(journal, 3)

        await supervisor.stop()

        assert (await lines(journal, 6))[3:] == ["end frontend", "end worker", "end scheduler"]

    run(scenario)


def test_a_child_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """The grace period bounds the end."""

    async def scenario() -> None:
        supervisor = Supervisor(
            [spec("frontend-0", Role.FRONTEND, STUBBORN)], pulse_dir=tmp_path, grace_s=GRACE_S | {Role.FRONTEND: 0.1}
        )
        supervisor.start()
        await supervisor.listening()

        await supervisor.stop()

    run(scenario)


def test_kill_does_not_wait_for_anything(tmp_path: Path) -> None:
    """A second Ctrl-C during a long grace period ends everything at once."""

    async def scenario() -> None:
        supervisor = Supervisor(
            [spec("frontend-0", Role.FRONTEND, STUBBORN)], pulse_dir=tmp_path, grace_s=GRACE_S | {Role.FRONTEND: 1e6}
        )
        supervisor.start()
        await supervisor.listening()
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0)

        supervisor.kill()

        await stopping

    run(scenario)


def test_a_dead_child_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once the service was ready, a death costs one log line and a new start."""

    async def scenario() -> None:
        journal = tmp_path / "journal"
        supervisor = Supervisor(
            [spec("worker-0", Role.WORKER, OBEDIENT, journal, "w")], pulse_dir=tmp_path, grace_s=GRACE_S, policy=QUICK
        )
        supervisor.was_ready = True
        supervisor.start()
        for life in range(1, 5):
            pid = int(starts(await lines(journal, life))[-1].split()[-1])
            os.kill(pid, signal.SIGKILL)
        await lines(journal, 5)

        await supervisor.stop()

        assert len(starts(await lines(journal, 6))) == 5

    run(scenario)
    logged = "".join(capfd.readouterr())
    assert logged.count("process died") == logged.count("killed by SIGKILL, possibly because memory ran out") == 4


def test_a_child_that_cannot_start_is_the_services_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before the service is ready, a child's exit is final, and its last line is the only error."""

    async def scenario() -> None:
        supervisor = Supervisor([spec("worker-0", Role.WORKER, FAILING)], pulse_dir=tmp_path, grace_s=GRACE_S)
        supervisor.start()

        assert await supervisor.failed == "worker-0 ended (exit code 3): model: there is none"
        await supervisor.stop()

    run(scenario)
    assert capfd.readouterr().err == ""


def test_a_process_that_cannot_even_be_started_is_a_failure_too(tmp_path: Path) -> None:
    """An error of the system in starting a process ends the start with that error as the reason."""

    async def scenario() -> None:
        supervisor = Supervisor(
            [ChildSpec("worker-0", Role.WORKER, ("/nowhere/python",))], pulse_dir=tmp_path, grace_s=GRACE_S
        )
        supervisor.start()

        assert "No such file or directory: '/nowhere/python'" in await supervisor.failed
        await supervisor.stop()

    run(scenario)


def test_the_exception_that_ended_a_process_is_its_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The reason is the exception, even if a library writes more lines after it; an exception in a log line is not."""
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: sys.stderr.write('nanobind: leaked 3 types!\\nSee https://nanobind/leaks\\n'))\n"
        "try: {}['a']\n"
        "except KeyError as error: raise AttributeError('no such field') from error\n"
    )
    handled = (
        "import sys, traceback\n"
        "try: {}['a']\n"
        "except KeyError: traceback.print_exc()\n"
        'sys.stderr.write(\'{"event": "continued"}\\nlast words\'); sys.exit(1)'
    )

    async def scenario() -> None:
        for source, reason in ((code, "AttributeError: no such field"), (handled, "last words")):
            supervisor = Supervisor([spec("worker-0", Role.WORKER, source)], pulse_dir=tmp_path, grace_s=GRACE_S)
            supervisor.start()
            assert await supervisor.failed == f"worker-0 ended (exit code 1): {reason}"
            await supervisor.stop()

    run(scenario)
    assert "leaked 3 types" in capfd.readouterr().err


def test_the_output_of_children_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The children's lines appear on stderr, including a last line without a line break; stdout stays empty."""
    code = "import sys; print('out'); sys.stderr.write('{\"event\": \"x\"}\\nlast words'); sys.exit(1)"

    async def scenario() -> None:
        supervisor = Supervisor([spec("worker-0", Role.WORKER, code)], pulse_dir=tmp_path, grace_s=GRACE_S)
        supervisor.start()
        assert await supervisor.failed == "worker-0 ended (exit code 1): last words"
        await supervisor.stop()

    run(scenario)
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.splitlines()) == ["last words", "out", '{"event": "x"}']


def test_stopping_during_the_pause_before_a_restart_starts_nothing(tmp_path: Path) -> None:
    """An end that falls between a death and the next start leaves no process."""

    async def scenario() -> None:
        journal = tmp_path / "journal"
        supervisor = Supervisor(
            [spec("worker-0", Role.WORKER, OBEDIENT, journal, "w")],
            pulse_dir=tmp_path,
            grace_s=GRACE_S,
            policy=RestartPolicy(first_delay_s=1e6, longest_delay_s=1e6),
        )
        supervisor.was_ready = True
        supervisor.start()
        child = psutil.Process(int((await lines(journal, 1))[0].split()[-1]))
        child.kill()
        await asyncio.to_thread(psutil.wait_procs, [child], 30)

        await supervisor.stop()

        assert len(starts(written_to(journal))) == 1

    run(scenario)


# The process sends pulses until it is asked to hang, and writes its number of starts to the journal.
HANGING = """
import os, sys, time
from shared.pulse import Pulse
pulse = Pulse()
open(sys.argv[1], "a", buffering=1).write("start\\n")
pulse.beat()
pulse.served()
time.sleep(600)
"""


def test_a_process_that_hangs_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process whose pulse stops is killed and started again, and since it had served, with the shortest pause."""

    async def scenario() -> None:
        journal = tmp_path / "journal"
        supervisor = Supervisor(
            [spec("worker-0", Role.WORKER, HANGING, journal)],
            pulse_dir=tmp_path,
            watchdog_s=0.5,
            grace_s=GRACE_S,
            policy=RestartPolicy(first_delay_s=0.01, longest_delay_s=1e6),
        )
        supervisor.was_ready = True
        supervisor.start()
        await lines(journal, 3)
        await supervisor.stop()

    run(scenario)
    logged = "".join(capfd.readouterr())
    assert logged.count("process hangs") == logged.count("it made no progress, so quire serve killed it") == 2


def test_a_child_dies_with_its_supervisor() -> None:
    """A supervisor that is killed takes its children along, without a word."""
    child = (
        "from quire_server.serve import lifeline; lifeline.attach();"
        " print('up', flush=True); import time; time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"environment = dict(os.environ, {lifeline.ENVIRONMENT}=str(os.getpid()))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], env=environment, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        orphan = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()

        psutil.wait_procs([orphan], timeout=30)
        assert not orphan.is_running()


def test_a_child_whose_supervisor_is_already_gone_ends_at_once() -> None:
    """A child cannot miss its supervisor's death at any time."""
    code = "from quire_server.serve import lifeline; lifeline.attach(); print('alive')"
    environment = dict(os.environ) | {lifeline.ENVIRONMENT: "1"}

    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)

    assert ended.stdout == b""
    assert ended.returncode == 1


class Terminal(io.StringIO):
    """A stream that a person watches."""

    def isatty(self) -> bool:
        """Return that the stream is a terminal."""
        return True


def test_log_lines_are_readable_for_people_and_json_for_machines() -> None:
    """A terminal gets rendered lines, a file the lines as they are."""
    line = '{"event": "worker joined", "level": "info", "worker": "worker-0"}'
    person, file = Terminal(), io.StringIO()

    LogForwarder(person).forward(line)
    LogForwarder(file).forward(line)

    assert "worker joined" in person.getvalue()
    assert "{" not in person.getvalue()
    assert file.getvalue() == line + "\n"


def test_only_log_lines_are_held_back_by_their_level() -> None:
    """Above a level everything is passed on, and so is whatever is no log line: tracebacks have no level."""
    out = io.StringIO()
    lines = ['{"event": "a", "level": "info"}', '{"event": "b", "level": "error"}', '{"event": "c"}', "Traceback", "{"]

    for line in lines:
        LogForwarder(out, "warning").forward(line)

    assert out.getvalue().splitlines() == lines[1:]


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-signal.SIGKILL, "killed by SIGKILL"), (-35, "killed by signal 35")],
)
def test_every_end_has_words(exit_code: int, words: str) -> None:
    """Signals without a name are reported by number, so that no child's exit stops the supervisor."""
    assert how_it_ended(exit_code) == words


@pytest.mark.parametrize(
    ("exit_code", "has_hung", "reason"),
    [
        (1, False, "worker ready"),
        (-signal.SIGKILL, False, "killed by SIGKILL, possibly because memory ran out; see the kernel's log (dmesg)"),
        (-signal.SIGKILL, True, "it made no progress, so quire serve killed it"),
        (-signal.SIGSEGV, False, "killed by SIGSEGV"),
    ],
)
def test_the_reason_for_a_signal_is_not_the_last_line(exit_code: int, has_hung: bool, reason: str) -> None:
    """A process that is killed cannot write why, so its last line follows as such."""
    assert why_it_ended(exit_code, "", has_hung=has_hung) == (reason if exit_code < 0 else "")
    words = why_it_ended(exit_code, "worker ready", has_hung=has_hung)
    assert words == (f"{reason}; its last log line was: worker ready" if exit_code < 0 else reason)
