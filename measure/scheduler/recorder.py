"""Cost of the flight recorder: steps with and without the recorder in turn, in one process.

    python -m measure.scheduler.recorder [--steps N] [--rows N]

*Loop* is the CPU time per step in the scheduler's loop. *Thread* is the CPU time for encoding and writing its entries.
In `steady`, all rows decode. In `churn`, a request with 500 prompt tokens ends, and one with 500 tokens to generate
arrives, as often as the rows sustain. A line extrapolates to a day with 10 requests/s. The last line is the pause at
the start of a segment: this process's fork, and the next step, which copies the pages that it changes.
"""

import argparse
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from measure.scheduler import core as bench
from scheduler_svc.collector import tune_collector
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.frontend.link import Outgoing
from scheduler_svc.recorder.encoding import Encoder
from scheduler_svc.recorder.segments import SegmentWriter
from scheduler_svc.recorder.tags import Tagger
from scheduler_svc.recorder.tape import Cut, RecordedScheduler, Tape
from shared.telemetry import Telemetry

_TOKENS = 500
"""Prompt tokens and generated tokens per request."""
_STEPS_PER_FRAME = 20
"""Steps of 25 ms between two frames."""
_DAY_S = 86_400
_REQUESTS_PER_S = 10


class _Side:
    """A core in a steady state, with or without a tape."""

    def __init__(self, rows: int, *, recorded: bool, churn: bool) -> None:
        self.tape = Tape() if recorded else None
        self._bench = bench.Bench(rows, "fcfs", Telemetry("quire-bench"), make_core=self._make_core)
        for index in range(rows):
            max_tokens = 2 + index * _TOKENS // rows if churn else 1 << 16
            self._bench.submit(self._bench.submission(max_tokens, _TOKENS), Outgoing())
        self._turns = self._bench.steps(1 << 30, self._arrivals(max(1, _TOKENS // rows)) if churn else _none())

    def _make_core(self, config: CoreConfig, incarnation: int) -> Scheduler:
        if self.tape is None:
            return Scheduler(config, incarnation)
        return RecordedScheduler(config, incarnation, self.tape)

    def step_us(self) -> float:
        """Run a step; return the loop's CPU time."""
        turn = next(self._turns)
        return (turn.commit + turn.plan) / 1e3

    def _arrivals(self, every: int) -> Iterator[list[bytes]]:
        while True:
            yield [self._bench.submission(_TOKENS, _TOKENS)]
            for _ in range(every - 1):
                yield []


def _none() -> Iterator[list[bytes]]:
    while True:
        yield []


def measure(rows: int, steps: int, *, churn: bool) -> tuple[float, float, float, float]:
    """Return microseconds per step: loop without and with recorder, and recorder thread; then bytes per step."""
    off, on = _Side(rows, recorded=False, churn=churn), _Side(rows, recorded=True, churn=churn)
    assert on.tape is not None
    encoder = Encoder(Tagger(), with_tokens=False)
    encoder.begin(0.0)
    with tempfile.TemporaryDirectory() as folder:
        writer = SegmentWriter.create(Path(folder) / "segment")

        def write() -> int:
            assert on.tape is not None
            began = time.thread_time_ns()
            items = [item for item in on.tape.items if not isinstance(item, Cut)]
            on.tape.items.clear()
            encoder.encode(items)
            writer.write(encoder.take())
            del items
            return time.thread_time_ns() - began

        for _ in range(300):
            off.step_us(), on.step_us()
        write()
        size, spent = writer.size, 0
        without, with_tape = [], []
        for step in range(steps):
            without.append(off.step_us())
            with_tape.append(on.step_us())
            if step % _STEPS_PER_FRAME == _STEPS_PER_FRAME - 1:
                spent += write()
        writer.close()
        return float(np.median(without)), float(np.median(with_tape)), spent / steps / 1e3, (writer.size - size) / steps


def measure_forks(rows: int, times: int = 15) -> tuple[list[float], list[float], list[float]]:
    """Return fork durations in ms (sorted), the forks' CPU time, and the CPU time of the following steps."""
    side = _Side(rows, recorded=True, churn=False)
    forks, spent, after = [], [], []
    for _ in range(times):
        for _ in range(50):
            side.step_us()
        began, cpu = time.perf_counter(), time.thread_time()
        pid = os.fork()
        if not pid:
            signal.pause()
        spent.append((time.thread_time() - cpu) * 1e3)
        forks.append((time.perf_counter() - began) * 1e3)
        after.append(side.step_us() / 1e3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return sorted(forks), sorted(spent), sorted(after)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=256)
    options = parser.parse_args()
    tune_collector()
    print("scenario   loop off   loop on   thread  us/step   bytes/step")
    sizes = {}
    for name, churn in (("steady", False), ("churn", True)):
        off, on, thread, size = measure(options.rows, options.steps, churn=churn)
        sizes[name] = size
        print(f"{name:<9}{off:>10.1f}{on:>10.1f}{thread:>9.1f}{size:>21.1f}", flush=True)
    per_request = (sizes["churn"] - sizes["steady"]) * max(1, _TOKENS // options.rows)
    # 20 steps of 256 rows per second serve 10 requests/s of 500 tokens each.
    per_day = _DAY_S * (_REQUESTS_PER_S * per_request + _REQUESTS_PER_S * _TOKENS / options.rows * sizes["steady"])
    forks = measure_forks(options.rows)
    print(f"a request: {per_request:.0f} bytes; a day of 10 requests/s: {per_day / 2**20:.0f} MiB")
    texts = [f"{each[len(each) // 2]:.1f} (most {each[-1]:.1f})" for each in forks]
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"a fork at {size} MiB: {texts[0]} ms, CPU {texts[1]} ms; the step after it: CPU {texts[2]} ms")


if __name__ == "__main__":
    main()
