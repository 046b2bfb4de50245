"""Send mutated frames into each socket of the running processes: none may crash, hang or grow without bound.

python -m checks.chaos.frames --count 1000000 --json frames.json

Each of the four sockets has its own adversary with valid keys (tests/shared/test_curve.py tests peers without keys).
Most of the time it uses the right epoch or incarnation:

* `scheduler-workers`: hellos, results and the rest of a worker's messages, while requests run;
* `scheduler-frontends`: submissions, credit, questions and operator commands from a front end;
* `worker-plans`: plans and the rest of a scheduler's messages;
* `frontend-core`: states, tokens and ends of a core, while clients read streams.

After every batch, a correct peer or client must get the correct response from the same process.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from checks.chaos import adversaries, command

TARGETS: dict[str, Callable[[Path, random.Random], adversaries.Adversary]] = {
    "scheduler-workers": adversaries.FalseWorker,
    "scheduler-frontends": adversaries.FalseFrontend,
    "worker-plans": adversaries.FalseScheduler,
    "frontend-core": adversaries.FalseCore,
}
MAX_GROWTH_MB = 200.0
"""Limit on a process's growth after the first tenth of its frames, in which its caches and queues fill up."""
MIN_BATCHES = 100
"""Growth is checked once there are this many batches. A leak of 2 KB per frame then exceeds the limit."""


@dataclass(slots=True)
class Outcome:
    """Result of the attack on one socket."""

    target: str
    frames: int = 0
    seconds: float = 0.0
    memory_mb: list[float] = field(default_factory=list)
    """Resident memory after each batch."""

    def figures(self) -> dict[str, Any]:
        """Return the results as JSON."""
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
    """Send `count` frames into a socket; raise AssertionError if its process fails."""
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
            adversary.print_log()
            raise
        finally:
            adversary.close()
    check_growth(target, outcome.memory_mb)
    return outcome


def check_growth(target: str, memory_mb: Sequence[float]) -> None:
    """Raise AssertionError if memory after each batch shows a leak. Too few batches cannot show one."""
    if len(memory_mb) < MIN_BATCHES:
        return
    growth = memory_mb[-1] - memory_mb[len(memory_mb) // 10 - 1]
    assert growth < MAX_GROWTH_MB, f"{target}: {growth:.0f} MB more than after the first tenth of the frames"


def main() -> int:
    """Attack every socket; print and write the results."""
    parser = command.parser("checks.chaos.frames", __doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="number of frames into each socket")
    parser.add_argument(
        "--target",
        choices=TARGETS,
        action="append",
        help="a socket to attack; may be given several times (default: all)",
    )
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
