"""`make test`: runs every promise in one pytest session and tells which folder took how long.

    python -m tests.run                     everything
    python -m tests.run tests/quire -k cli  what pytest is told

The exit code is pytest's own: 0 only when everything that was found passed. The last line is `N passed, N failed`.
"""

import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class FolderTimes:
    """What the tests of one folder came to."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


class TimeTable:
    """A pytest plugin that adds up outcomes and times per folder."""

    def __init__(self) -> None:
        self.folders: defaultdict[str, FolderTimes] = defaultdict(FolderTimes)
        self._failed: set[str] = set()
        self._started = time.monotonic()
        self._collected_s = 0.0

    def pytest_collection_finish(self) -> None:
        """Collecting imports torch and transformers; that time belongs to no folder."""
        self._collected_s = time.monotonic() - self._started

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported is a failure of its folder."""
        if report.failed:
            self.folders[_folder(report.nodeid)].failed += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up and tear-down count too; a test that fails in both fails once."""
        folder = self.folders[_folder(report.nodeid)]
        folder.seconds += report.duration
        if report.failed and report.nodeid not in self._failed:
            self._failed.add(report.nodeid)
            folder.failed += 1
        elif report.skipped:
            folder.skipped += 1
        elif report.when == "teardown" and report.passed and report.nodeid not in self._failed:
            folder.passed += 1

    def render(self) -> str:
        """The table, and one closing line."""
        rows = sorted(self.folders.items())
        width = max([len(name) for name, _ in rows] + [len("collection")])
        lines = [f"{'folder':<{width}}  {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}"]
        lines += [
            f"{name:<{width}}  {times.passed - times.skipped:>7} {times.failed:>7} {times.skipped:>7}"
            f" {times.seconds:>8.1f}"
            for name, times in rows
        ]
        lines.append(f"{'collection':<{width}}  {'':>23} {self._collected_s:>8.1f}")
        passed = sum(times.passed - times.skipped for _, times in rows)
        failed = sum(times.failed for _, times in rows)
        total_s = time.monotonic() - self._started
        return "\n".join(["", *lines, "", f"{passed} passed, {failed} failed in {total_s:.0f} s"])


def main(arguments: list[str]) -> int:
    """Runs pytest with these arguments; returns its exit code."""
    table = TimeTable()
    named = any(not argument.startswith("-") for argument in arguments)
    code = pytest.main([f"--rootdir={ROOT}", *arguments, *([] if named else [str(ROOT / "tests")])], plugins=[table])
    print(table.render(), flush=True)
    return int(code)


def _folder(node: str) -> str:
    """The folder of a test, two levels deep: "tests/e2e"."""
    return "/".join(Path(node.split("::")[0]).parts[:2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
