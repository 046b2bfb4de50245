"""A guard on the scheduler's CPU time that does not depend on the machine: function calls per steady step."""

import sys
from itertools import repeat
from pathlib import Path
from types import FrameType

import pytest

import scheduler_svc
import shared
from measure.scheduler.core import Bench
from scheduler_svc.frontend.link import Outgoing
from scheduler_svc.recorder.tape import RecordedScheduler, Tape
from shared.telemetry import Telemetry

_COUNTED = tuple(str(Path(str(package.__file__)).parent) for package in (scheduler_svc, shared))
_STEPS = 160
_MOST_CALLS = 230
"""A new feature may need more calls; raise the limit only if the feature is worth the time in every step."""


def _calls_per_step(rows: int) -> float:
    """Return the calls of Python and C functions from the scheduler's code per steady step."""
    tape = Tape()
    bench = Bench(
        rows, "balanced", Telemetry("test"), make_core=lambda config, number: RecordedScheduler(config, number, tape)
    )
    for _ in range(rows):
        bench.submit(bench.submission(max_tokens=1 << 16, prompt_tokens=64), Outgoing())
    steps = bench.steps(rows + 200 + _STEPS, repeat([]))
    for _ in range(rows + 200):
        next(steps)
    calls = 0

    def called(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        # For a call of a C function, the frame is that of the caller.
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(_COUNTED)

    sys.setprofile(called)
    try:
        for _ in range(_STEPS):
            next(steps)
    finally:
        sys.setprofile(None)
    return calls / _STEPS


@pytest.mark.parametrize("rows", [16, 64])
def test_a_steady_step_needs_few_function_calls(rows: int) -> None:
    """Decoding, commit, planning, recording and encoding of a step need few calls, for any number of rows."""
    calls = _calls_per_step(rows)

    assert calls <= _MOST_CALLS, f"{calls:.1f} calls per step"
