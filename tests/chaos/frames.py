"""Mutated frames into each socket of the running processes: none may crash, hang or grow without bound.

python -m tests.chaos.frames --count 1000000 --json frames.json

Four sockets, each with its own adversary, who has got in (what keys keep out is tests/shared/test_curve.py's matter)
and holds the right epoch or incarnation most of the time:

* `scheduler-workers`: hellos, results and the rest of a worker's messages, while requests run;
* `scheduler-frontends`: submissions, credit, questions and operators' orders of a front end;
* `worker-plans`: plans and the rest of a scheduler's messages;
* `frontend-core`: states, tokens and ends of a core, while clients read streams.

After every batch an honest peer, or client, must get the exact answer, from the same process.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import adversaries, command

TARGETS: dict[str, Callable[[Path, random.Random], adversaries.Adversary]] = {
    "scheduler-workers": adversaries.FalseWorker,
    "scheduler-frontends": adversaries.FalseFrontend,
    "worker-plans": adversaries.FalseScheduler,
    "frontend-core": adversaries.FalseCore,
}
MAX_GROWTH_MB = 200.0
"""What a process may take beyond what it had after its first tenth: caches and queues have bounds, but fill up."""


@dataclass(slots=True)
class Outcome:
    """What became of one socket's process."""

    target: str
    frames: int = 0
    seconds: float = 0.0
    memory_mb: list[float] = field(default_factory=list)
    """Resident, after each batch."""

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        tenth = max(1, len(self.memory_mb) // 10)
        return {
            "frames": self.frames,
            "seconds": round(self.seconds, 1),
            "memory_mb": {
                "after the first batch": round(self.memory_mb[0], 1),
                "after a tenth": round(self.memory_mb[tenth - 1], 1),
                "last": round(self.memory_mb[-1], 1),
                "most": round(max(self.memory_mb), 1),
            },
        }


def attack(target: str, count: int, seed: int = 0) -> Outcome:
    """Sends `count` frames into a socket; raises AssertionError when its process does not bear it."""
    outcome = Outcome(target)
    with tempfile.TemporaryDirectory(prefix="qf-", dir="/tmp") as folder:
        adversary = TARGETS[target](Path(folder), random.Random(seed))
        try:
            process = psutil.Process(adversary.pid)
            begin = time.monotonic()
            adversary.check()
            while outcome.frames < count:
                outcome.frames += adversary.batch()
                adversary.check()
                assert process.is_running(), "the process has died"
                assert process.pid == adversary.pid, "the process has died and was started again"
                outcome.memory_mb.append(process.memory_info().rss / 1e6)
            outcome.seconds = time.monotonic() - begin
        except BaseException:
            adversary.tell()
            raise
        finally:
            adversary.close()
    tenth = max(1, len(outcome.memory_mb) // 10)
    growth = outcome.memory_mb[-1] - outcome.memory_mb[tenth - 1]
    assert growth < MAX_GROWTH_MB, f"{target}: {growth:.0f} MB more than after the first tenth"
    return outcome


def main() -> int:
    """Attacks every socket; prints and writes the figures."""
    parser = command.parser("tests.chaos.frames", __doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="frames into each socket")
    parser.add_argument("--target", choices=TARGETS, action="append", help="one socket; given again, several")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for target in options.target or TARGETS:
        figures[target] = attack(target, options.count, options.seed).figures()
        print(target, json.dumps(figures[target]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
