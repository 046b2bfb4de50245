"""Run the tests in two processes and print how long each folder and the slowest tests took.

    python -m tests.run                     what `make test` runs: the daily selection (tests/selection.py)
    python -m tests.run --all               what `make test-all` runs: every test
    python -m tests.run tests/quire -k cli  the tests that pytest selects by these arguments

Two processes run the tests, one group at a time, the longest first. `tests/groups.py` defines the groups. Tests
selected by arguments run in one process, unless `-n` is among the arguments.

The report names the omitted tests. Every test's duration is written to build/test-durations.json. The exit code is
pytest's own: 0 only if every test that was found passed. The last line is `N passed, N failed`.

Nothing outlives a run, whether it ends or is interrupted: processes started by tests are killed, and their temporary
files are removed. A process that outlives a completed run is a failure. For this, the run forks. The child runs pytest.
The parent adopts and reaps orphaned processes, like a machine's init process.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from tests.examples import SEED
from tests.selection import LEFT_OUT, table_of

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "build" / "test-durations.json"
_NUM_SLOWEST = 20
_NUM_PROCESSES = 2
"""One for the tests that start services, one for the others."""
_TEARDOWN_S = 30
"""How long processes may take to end after SIGTERM."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class FolderTimes:
    """Outcomes and seconds of one folder's tests."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


class TimeTable:
    """A pytest plugin that adds up outcomes and times per folder, and times per test."""

    def __init__(self) -> None:
        self.folders: defaultdict[str, FolderTimes] = defaultdict(FolderTimes)
        self.tests: defaultdict[str, float] = defaultdict(float)
        """By test: seconds, with set-up and tear-down."""
        self.left_out: list[str] = []
        """Node ids of the tests that were found and not selected."""
        self.is_interrupted = False
        self._failed: set[str] = set()
        self._started = time.monotonic()
        self._collected_s = 0.0

    def pytest_runtest_logstart(self) -> None:
        """Collecting imports torch and transformers; that time belongs to no folder."""
        if not self._collected_s:
            self._collected_s = time.monotonic() - self._started

    def pytest_keyboard_interrupt(self) -> None:
        """Note the interruption."""
        self.is_interrupted = True

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Note the tests that a run in this process leaves out."""
        self.left_out += [item.nodeid for item in items]

    def pytest_testnodedown(self, node: object) -> None:
        """Record the tests that a parallel run omits; each process omits the same ones."""
        self.left_out = getattr(node, "workeroutput", {}).get(LEFT_OUT, self.left_out)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported is a failure of its folder."""
        if report.failed:
            self.folders[_folder(report.nodeid)].failed += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up and tear-down count too; a test that fails in both fails once."""
        test = report.nodeid
        folder = self.folders[_folder(test)]
        folder.seconds += report.duration
        self.tests[test] += report.duration
        if report.failed and test not in self._failed:
            self._failed.add(test)
            folder.failed += 1
        elif report.skipped:
            folder.skipped += 1
        elif report.when == "teardown" and report.passed and test not in self._failed:
            folder.passed += 1

    def render(self, *, interrupted: bool) -> str:
        """Return the tables and one closing line."""
        rows = sorted(self.folders.items())
        width = max([len(name) for name, _ in rows] + [len("collection")])
        lines = [f"{'folder':<{width}}  {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}"]
        lines += [
            f"{name:<{width}}  {times.passed - times.skipped:>7} {times.failed:>7} {times.skipped:>7}"
            f" {times.seconds:>8.1f}"
            for name, times in rows
        ]
        lines.append(f"{'collection':<{width}}  {'':>23} {self._collected_s:>8.1f}")
        slowest = sorted(self.tests.items(), key=lambda test: -test[1])[:_NUM_SLOWEST]
        lines += ["", "slowest tests", *(f"{seconds:>8.1f} s  {name}" for name, seconds in slowest)]
        if self.left_out:
            lines += ["", f"left out: {len(self.left_out)} tests, which make test-all runs", *table_of(self.left_out)]
        passed = sum(times.passed - times.skipped for _, times in rows)
        failed = sum(times.failed for _, times in rows)
        total_s = time.monotonic() - self._started
        closing = f"{passed} passed, {failed} failed in {total_s:.0f} s"
        return "\n".join(["", *lines, "", f"INTERRUPTED, not all tests ran: {closing}" if interrupted else closing])


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments, or all tests, in a child process; return pytest's exit code."""
    _adopt_orphans()
    with _temporary_files():
        child = os.fork()
        if child == 0:
            _exit_with(run_tests, arguments)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(child, number))
        code = _reap_until(child)
        _end_processes(_descendants())
    return code


def run_tests(arguments: list[str]) -> int:
    """Run pytest, end leftover processes, and print the tables; return the exit code."""
    table = TimeTable()
    chosen = [argument for argument in arguments if argument != "--all"]
    selects = any(not argument.startswith("-") for argument in chosen)
    if not selects:
        chosen += ["-n", str(_NUM_PROCESSES), "--dist", "loadscope", "--no-loadscope-reorder"]
        chosen += [str(ROOT / "tests")] if "--all" in arguments else ["--daily", str(ROOT / "tests")]
        print(f"drawn by QUIRE_SEED={SEED}", flush=True)
    # All processes of a run use the same seed, even if the date changes during the run.
    os.environ["QUIRE_SEED"] = str(SEED)
    try:
        code = int(pytest.main([f"--rootdir={ROOT}", *chosen], plugins=[table]))
    except BaseException as error:
        # The fixtures of an interrupted test may fail during teardown.
        if not (table.is_interrupted or isinstance(error, KeyboardInterrupt)):
            raise
        code = int(pytest.ExitCode.INTERRUPTED)
    left = [process for process in _descendants(os.getppid()) if process.pid != os.getpid()]
    commands = [_command(process) for process in left]
    _end_processes(left)
    interrupted = code == pytest.ExitCode.INTERRUPTED
    if not selects and not interrupted:
        DURATIONS.parent.mkdir(exist_ok=True)
        durations = {name: round(seconds, 3) for name, seconds in sorted(table.tests.items())}
        DURATIONS.write_text(json.dumps(durations, indent=1) + "\n", encoding="utf-8")
    if commands and not interrupted:
        print("processes outlived the tests:", *commands, sep="\n  ")
        code = code or int(pytest.ExitCode.TESTS_FAILED)
    print(table.render(interrupted=interrupted), flush=True)
    return code


@contextlib.contextmanager
def _temporary_files() -> Iterator[None]:
    """Put the temporary files of the tests into a folder that is removed with them.

    pytest's own folders remain, because it retains those of failed tests.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="quire-tests-", ignore_cleanup_errors=True) as folder,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


def _adopt_orphans() -> None:
    """Become the parent of orphaned processes, so that none is lost. Only Linux can do this."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _exit_with(function: Callable[[list[str]], int], arguments: list[str]) -> NoReturn:
    """End a forked process with the result of a function, and never return into the parent's code."""
    code = 1
    try:
        code = function(arguments)
    except BaseException:  # Only the message remains to be reported.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _reap_until(child: int) -> int:
    """Reap every process that exits, until this child exits; return the child's exit code."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return the living descendants of a process, or of this one."""
    return [process for process in psutil.Process(pid).children(recursive=True) if _is_alive(process)]


def _end_processes(processes: list[psutil.Process]) -> None:
    """Terminate processes and kill those that do not end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=_TEARDOWN_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return f"process {process.pid}"


def _folder(node: str) -> str:
    """Return the folder of a test, two levels deep: "tests/e2e"."""
    return "/".join(Path(node.split("::")[0]).parts[:2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
