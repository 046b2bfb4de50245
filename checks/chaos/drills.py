"""Drills with a leader, a standby, etcd and mock workers: several of them are lost at once, in unkind orders.

    python -m checks.chaos.drills

Between the drills, some scheduler leads again and a standby has the whole journal. The token at each position of a
stream is known (`measure.scheduler.mock_workers`), so all tokens are compared at the end.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from checks.chaos import command
from measure.frontend.child import Child
from measure.testbed.etcd import Etcd, etcd
from measure.testbed.service import DEFAULTS, PATIENCE_S, QUIRE, free_ports, until

_ROWS, _ROW_TOKENS = 64, 4000
_PROMPT_TOKENS = 64
_STEP_MS = 100


@dataclass(slots=True)
class Scheduler:
    """One scheduler, which can be started again."""

    flags: tuple[str, ...]
    folder: Path
    logs: list[Path] = field(default_factory=list)
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        self.logs.append(self.folder.with_name(f"{self.folder.name}-{len(self.logs)}.log"))
        with self.logs[-1].open("wb") as log:
            self.process = subprocess.Popen(
                [*QUIRE, "scheduler", *self.flags], stdout=log, stderr=log, env={**os.environ, **DEFAULTS}
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def numbers(self) -> list[int]:
        """Return the numbers under which this scheduler led."""
        lines = (line for log in self.logs for line in _lines(log))
        return [line["leader_number"] for line in lines if line["event"] == "scheduler is up"]

    def has_logged(self, event: str) -> bool:
        """Return whether the newest process has logged an event."""
        return any(line["event"] == event for line in _lines(self.logs[-1]))


@dataclass(slots=True)
class Stand:
    """All processes that a drill may take away."""

    store: Etcd
    schedulers: list[Scheduler]
    rng: random.Random

    @property
    def leader(self) -> Scheduler:
        """The scheduler that led last."""
        return max(self.schedulers, key=lambda each: max(each.numbers(), default=0))

    @property
    def standby(self) -> Scheduler:
        """The other scheduler."""
        leader = self.leader
        return next(each for each in self.schedulers if each is not leader)

    def num_tenures(self) -> int:
        """Return how often a scheduler has begun to lead."""
        return sum(len(each.numbers()) for each in self.schedulers)


def leader(stand: Stand) -> None:
    """Kill the leader."""
    lost = stand.leader
    lost.kill()
    lost.start()


def leader_and_standby(stand: Stand) -> None:
    """Kill both schedulers, and start them in any order."""
    for each in stand.schedulers:
        each.kill()
    for each in stand.rng.sample(stand.schedulers, 2):
        each.start()


def leader_during_catch_up(stand: Stand) -> None:
    """Kill the standby, and the leader as soon as the new standby follows it."""
    lost, standby = stand.leader, stand.standby
    standby.kill()
    standby.start()
    until(lambda: standby.has_logged("standby: follows a leader"), "the standby follows")
    lost.kill()
    lost.start()


def store_for_10_s(stand: Stand) -> None:
    """Kill etcd, and start it again after 10 s."""
    stand.store.kill()
    time.sleep(10)
    stand.store.start()


def store_and_leader(stand: Stand) -> None:
    """Kill etcd and the leader at once."""
    lost = stand.leader
    stand.store.kill()
    lost.kill()
    time.sleep(3)
    stand.store.start()
    lost.start()


def leader_while_the_standby_is_stopped(stand: Stand) -> None:
    """Stop the standby (SIGSTOP), and continue it after the leader was killed."""
    lost, standby = stand.leader, stand.standby
    standby.signal(signal.SIGSTOP)
    time.sleep(4)
    lost.kill()
    lost.start()
    standby.signal(signal.SIGCONT)


DRILLS: tuple[Callable[[Stand], None], ...] = (
    leader, leader_and_standby, leader_during_catch_up, store_for_10_s, store_and_leader,
    leader_while_the_standby_is_stopped,
)  # fmt: skip


def run(folder: Path, *, rounds: int = 1, streams: int = 120, seed: int = 0) -> dict[str, Any]:
    """Run all drills in random order; return the number of tokens and the time until a scheduler led again, seconds.

    Raises:
        AssertionError: no scheduler leads in time, or a token is wrong.
        ChildError: a front end or the workers failed.
    """
    rng = random.Random(seed)
    drills = [drill for _ in range(rounds) for drill in rng.sample(DRILLS, len(DRILLS))]
    until_led: dict[str, list[float]] = {drill.__name__: [] for drill in DRILLS}
    with ExitStack() as stack:
        store = stack.enter_context(etcd(folder))
        ports = free_ports(6)
        addresses = [[f"tcp://127.0.0.1:{port}" for port in ports[index::2]] for index in range(2)]
        stand = Stand(store, [_scheduler(folder, index, addresses, store.address) for index in range(2)], rng)
        for each in stand.schedulers:
            each.start()
            stack.callback(each.kill)
        workers = Child(
            folder, "measure.scheduler.mock_workers", f"--address={addresses[0][1]},{addresses[1][1]}", "--workers=4",
            f"--rows={_ROWS}", f"--step-ms={_STEP_MS}", f"--row-tokens={_ROW_TOKENS}", environ=DEFAULTS,
        )  # fmt: skip
        stack.enter_context(workers)
        end = folder / "end"
        frontend = Child(
            folder, "measure.scheduler.mock_frontend", f"--address={addresses[0][0]},{addresses[1][0]}", "--index=0",
            f"--streams={streams}", f"--prompt-tokens={_PROMPT_TOKENS}",
            f"--max-tokens={_ROW_TOKENS - _PROMPT_TOKENS}", f"--timeout-s={PATIENCE_S}", f"--until={end}",
        )  # fmt: skip
        stack.enter_context(frontend)
        assert frontend.line(PATIENCE_S) == "running"
        for drill in drills:
            until(lambda: stand.standby.has_logged("standby: has the whole journal"), "a standby is ready")
            tenures, began = stand.num_tenures(), time.monotonic()
            drill(stand)
            until(partial(_leads_again, stand, tenures), f"a scheduler leads after {drill.__name__}")
            until_led[drill.__name__].append(round(time.monotonic() - began, 2))
            time.sleep(2)
        end.touch()
        report = json.loads(frontend.line(PATIENCE_S))
    assert report["wrong_tokens"] == 0, f"{report['wrong_tokens']} of {report['tokens']} tokens are wrong"
    return {"drills": len(drills), "tokens": report["tokens"], "until_led_s": until_led}


def _scheduler(folder: Path, index: int, addresses: list[list[str]], store: str) -> Scheduler:
    frontends, workers, standbys = addresses[index]
    flags = (
        *(f"--frontend-address={frontends}", f"--worker-address={workers}", f"--standby-address={standbys}"),
        *(f"--standby-of={addresses[1 - index][2]}", f"--leader-lease=etcd://{store}/quire", f"--max-num-seqs={_ROWS}"),
        *(f"--journal={folder}/journal-{index}", "--record-dir=off"),
    )
    return Scheduler(flags, folder / f"scheduler-{index}")


def _leads_again(stand: Stand, tenures: int) -> bool:
    return stand.num_tenures() > tenures


def _lines(log: Path) -> list[dict[str, Any]]:
    whole, _, _ = log.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def main() -> int:
    """Run the drills; print and store their results."""
    parser = command.parser("checks.chaos.drills", __doc__)
    parser.add_argument("--rounds", type=int, default=1, help="number of times that each drill runs")
    parser.add_argument("--streams", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-drills-") as folder:
        figures = run(Path(folder), rounds=options.rounds, streams=options.streams, seed=options.seed)
        command.tell(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
