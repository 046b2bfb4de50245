"""Run the core or the simulator with one module changed, and look for a check that fails.

The process must not have imported core or simulator before. A mutant's output is discarded.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import sys
import types
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checks.sim.scenario import Scenario

CHANGED = ("scheduler_svc.core", "checks.sim", "records.rules")
"""Packages whose modules may be changed."""
SHORT_SEEDS = range(16)
SHORT_STEPS = 300
"""In runs as short as this, the simulator checks the core's invariants after every event."""
AIMED_SEEDS = range(3)
AIMED_STEPS = 500
LONG_SEEDS = range(100, 112)
LONG_STEPS = 1000
CPU_S = 300
"""CPU time limit. Unchanged code takes about 60 s, or 120 s with planted bugs."""
MEMORY_BYTES = 6 << 30
_TESTS = ("tests/scheduler_svc", "tests/sim/test_findings.py", "tests/sim/test_block_pool.py")
_PLANTED = "tests/sim/test_planted_bugs.py"
"""Planted bugs for mutants of the oracle. An oracle that accepts everything passes every simulation but misses planted
bugs.
"""
_LEFT_OUT = ("tests/measure/test_bench_link.py",)
"""Tests that are skipped because they start processes, which would run the unchanged core."""


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """An import hook that loads one module from a string."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name = name
        self._path = path
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self._path))

    def get_source(self, fullname: str) -> str:
        return self._source


def hunt(path: Path, source: str | None, report: Connection, scratch: Path) -> None:
    """Send the name of the check that killed the mutant, or "" if it survived.

    Args:
        path: the module's file.
        source: the changed source; None for the unchanged core.
        report: the pipe for the result.
        scratch: a folder for temporary files.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(scratch)
    assert not [name for name in sys.modules if name.startswith(CHANGED)], "the code is imported already"
    if source is not None:
        parts = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
        sys.meta_path.insert(0, _Changed(".".join(parts), path, source))
    tests = (*_TESTS, _PLANTED) if "rules" in path.parts else _TESTS
    try:
        report.send(_killer(tests))
    except BaseException as error:
        report.send(f"import: {type(error).__name__}")


def _killer(tests: Sequence[str]) -> str:
    return _simulate(SHORT_SEEDS, SHORT_STEPS) or _test(tests) or _simulate_aimed() or _simulate(LONG_SEEDS, LONG_STEPS)


def _simulate(seeds: range, steps: int) -> str:
    from checks.sim.scenario import draw

    return next((killer for seed in seeds if (killer := _failed_check(draw(seed), steps))), "")


def _simulate_aimed() -> str:
    """Run simulations of rare situations, as the planted bugs require."""
    from checks.planted import BUGS
    from checks.sim.scenario import draw

    aims = dict.fromkeys(bug.aim for bug in BUGS)
    worlds = (aim(draw(seed)) for seed in AIMED_SEEDS for aim in aims)
    return next((killer for world in worlds if (killer := _failed_check(world, AIMED_STEPS))), "")


def _failed_check(scenario: "Scenario", steps: int) -> str:
    from checks.sim.coverage import Coverage
    from checks.sim.simulation import Simulation

    failure = Simulation(scenario, Coverage()).run(steps).failure
    return f"sim: {failure.check}" if failure is not None else ""


class _FirstFailure:
    """A pytest plugin that records the first failure."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: object) -> None:
        """Record a failed test."""
        if getattr(report, "failed", False) and not self.name:
            self.name = str(getattr(report, "nodeid", "?")).rpartition("/")[2]

    def pytest_collectreport(self, report: object) -> None:
        """Record a failed collection."""
        self.pytest_runtest_logreport(report)


def _test(tests: Sequence[str]) -> str:
    import pytest

    first = _FirstFailure()
    ignored = [f"--ignore={path}" for path in _LEFT_OUT]
    code = pytest.main([*tests, *ignored, "-x", "-q", "-p", "no:cacheprovider"], plugins=[first])
    return "" if code == 0 else f"test: {first.name or code}"
