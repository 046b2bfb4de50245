"""Run the tests in two processes and print how long each folder and the slowest tests took.

    python -m tests.run                     what `make test` runs: all but the tests marked `release`
    python -m tests.run --all               what `make test-all` runs: every test
    python -m tests.run tests/quire -k cli  the tests that pytest selects by these arguments

Two processes run the tests, one group at a time, the longest first. `tests/groups.py` defines the groups. Tests
selected by arguments run in one process, unless `-n` is among the arguments.

The duration of every test is written to build/test-durations.json. The exit code is pytest's own: 0 only when every
test that was found passed. The last line is `N passed, N failed`.
"""

import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "build" / "test-durations.json"
_NUM_SLOWEST = 20
_NUM_PROCESSES = 2
"""One for the tests that start services, one for the others."""


@dataclass(slots=True)
class FolderTimes:
    """Outcomes and seconds of the tests of one folder."""

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
        self._failed: set[str] = set()
        self._started = time.monotonic()
        self._collected_s = 0.0

    def pytest_runtest_logstart(self) -> None:
        """Collecting imports torch and transformers; that time belongs to no folder."""
        if not self._collected_s:
            self._collected_s = time.monotonic() - self._started

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

    def render(self) -> str:
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
        passed = sum(times.passed - times.skipped for _, times in rows)
        failed = sum(times.failed for _, times in rows)
        total_s = time.monotonic() - self._started
        return "\n".join(["", *lines, "", f"{passed} passed, {failed} failed in {total_s:.0f} s"])


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments, or all tests; return pytest's exit code."""
    table = TimeTable()
    chosen = [argument for argument in arguments if argument != "--all"]
    selects = any(not argument.startswith("-") for argument in chosen)
    if not selects:
        chosen += ["-n", str(_NUM_PROCESSES), "--dist", "loadscope", "--no-loadscope-reorder"]
        chosen += [str(ROOT / "tests")] if "--all" in arguments else ["-m", "not release", str(ROOT / "tests")]
    code = int(pytest.main([f"--rootdir={ROOT}", *chosen], plugins=[table]))
    if not selects:
        DURATIONS.parent.mkdir(exist_ok=True)
        durations = {name: round(seconds, 3) for name, seconds in sorted(table.tests.items())}
        DURATIONS.write_text(json.dumps(durations, indent=1) + "\n", encoding="utf-8")
    print(table.render(), flush=True)
    return code


def _folder(node: str) -> str:
    """Return the folder of a test, two levels deep: "tests/e2e"."""
    return "/".join(Path(node.split("::")[0]).parts[:2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
