"""Takeover with many workers and streams: a real leader and standby with a lease in etcd, and mock workers.

    python -m measure.scheduler.takeover

The leader is killed (SIGKILL) while all streams decode. All requests are resumable, so the standby has a journal of all
tokens. The front ends are processes with the real link and no clients (`mock_frontend`). All workers are one process
with real links and row tables, and no model (`mock_workers`).

*Pause* is the time between the last token before the takeover and the first one after it, per stream. *Went on* is the
time from SIGKILL to the first token after it. The parts are times from SIGKILL to log lines of the new leader.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from measure.frontend.child import Child
from measure.spread import Spread
from measure.testbed.etcd import etcd
from measure.testbed.service import DEFAULTS, QUIRE, free_ports
from shared.cpu_time import cpu_seconds

PROMPT_TOKENS = 64
_ROW_TOKENS = 1024
"""Tokens for which each row has KV blocks."""
_PARTS = {"taking over": "first", "scheduler is up": "first", "worker joined": "last", "front end joined": "last"}
"""Log lines of the new leader, and which of several counts."""


@dataclass(frozen=True, slots=True)
class Case:
    """Size of one takeover."""

    workers: int = 64
    streams: int = 10_000
    frontends: int = 4
    step_ms: float = 100.0
    lease_s: float = 2.0
    settle_s: float = 5.0
    """Time for which all streams run before the leader is killed, seconds."""
    timeout_s: float = 90.0


@dataclass(slots=True)
class Result:
    """Measurements of one takeover; times in seconds."""

    case: Case
    pause_p50: float
    pause_p99: float
    pause_max: float
    went_on_p50: float
    went_on_max: float
    """Time until every stream went on."""
    parts: dict[str, float]
    leader_cpu_s: float
    """CPU time of the new leader from SIGKILL until every stream went on."""
    resubmitting_s: float
    """Longest iteration of a front end's event loop."""
    tokens: int
    wrong_tokens: int
    prefilled: int
    prefilled_again: int
    """Tokens that were computed again after the takeover."""
    load: float
    """Load average of the machine before SIGKILL."""
    log: str = field(repr=False, default="")


@dataclass(slots=True)
class _Scheduler:
    """One scheduler process."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def lines(self) -> list[dict[str, Any]]:
        whole, _, _ = self.log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def await_line(self, event: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not any(line["event"] == event for line in self.lines()):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"scheduler: no log line {event!r}: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)


def measure(case: Case, folder: Path) -> Result:
    """Run one takeover.

    Raises:
        ChildError, RuntimeError: a process failed or did not respond.
    """
    rows = -(-case.streams // case.workers) + 4
    with ExitStack() as stack:
        store = stack.enter_context(etcd(folder)).address
        schedulers = _start_schedulers(case, rows, store, folder, stack)
        addresses = [",".join(each[place] for each in schedulers.addresses) for place in range(2)]
        workers = Child(
            folder, "measure.scheduler.mock_workers", f"--address={addresses[1]}", f"--workers={case.workers}",
            f"--rows={rows}", f"--step-ms={case.step_ms}", f"--row-tokens={_ROW_TOKENS}", environ=DEFAULTS,
        )  # fmt: skip
        with workers:
            assert workers.line(case.timeout_s) == "started"
            frontends = [
                stack.enter_context(_frontend(case, index, addresses[0], folder)) for index in range(case.frontends)
            ]
            for frontend in frontends:
                assert frontend.line(case.timeout_s) == "running"
            leader, standby = schedulers.processes
            standby.await_line("standby: has the whole journal", case.timeout_s)
            time.sleep(case.settle_s)
            load, cpu_s = os.getloadavg()[0], cpu_seconds(standby.process.pid)
            killed_at, killed_unix = time.monotonic(), time.time()
            leader.process.kill()
            reports = [json.loads(frontend.line(case.timeout_s)) for frontend in frontends]
            cpu_s = cpu_seconds(standby.process.pid) - cpu_s
        prefills = json.loads(workers.line())
        log = standby.log.read_text()
        lines = standby.lines()
    pauses = [pause for report in reports for pause in report["pauses"]]
    went_on = [at - killed_at for report in reports for at in report["went_on_at"]]
    spread = Spread.of(pauses)
    parts: dict[str, float] = {}
    for line in lines:
        at = datetime.fromisoformat(line["timestamp"]).timestamp() - killed_unix
        if at > 0 and (kind := _PARTS.get(line["event"])) and not (kind == "first" and line["event"] in parts):
            parts[line["event"]] = round(at, 3)
    return Result(
        case=case,
        pause_p50=round(spread.p50, 3),
        pause_p99=round(spread.p99, 3),
        pause_max=round(max(pauses), 3),
        went_on_p50=round(Spread.of(went_on).p50, 3),
        went_on_max=round(max(went_on), 3),
        parts=parts,
        leader_cpu_s=round(cpu_s, 2),
        resubmitting_s=max(report["resubmitting_s"] for report in reports),
        tokens=sum(report["tokens"] for report in reports),
        wrong_tokens=sum(report["wrong_tokens"] for report in reports),
        prefilled=prefills["prefilled"],
        prefilled_again=prefills["prefilled_again"],
        load=round(load, 2),
        log=log,
    )


def _frontend(case: Case, index: int, addresses: str, folder: Path) -> Child:
    own = folder / f"frontend-{index}"
    own.mkdir()
    return Child(
        own,
        "measure.scheduler.mock_frontend",
        f"--address={addresses}",
        f"--index={index}",
        f"--streams={case.streams // case.frontends}",
        f"--prompt-tokens={PROMPT_TOKENS}",
        f"--max-tokens={_ROW_TOKENS - PROMPT_TOKENS}",
        f"--timeout-s={case.timeout_s}",
    )


@dataclass(frozen=True, slots=True)
class _Schedulers:
    processes: tuple[_Scheduler, _Scheduler]
    addresses: list[tuple[str, str]]
    """Addresses for front ends and workers, per scheduler."""


def _start_schedulers(case: Case, rows: int, store: str, folder: Path, stack: ExitStack) -> _Schedulers:
    """Start the leader, and then the standby."""
    ports = free_ports(6)
    bases = [[f"tcp://127.0.0.1:{port}" for port in ports[3 * index : 3 * index + 3]] for index in range(2)]
    found = []
    for index, (frontends, workers, standbys) in enumerate(bases):
        log = folder / f"scheduler-{index}.log"
        command = [
            *(*QUIRE, "scheduler", f"--frontend-address={frontends}", f"--worker-address={workers}"),
            *(f"--standby-address={standbys}", f"--standby-of={bases[1 - index][2]}"),
            *(f"--leader-lease=etcd://{store}/quire", f"--leader-lease-s={case.lease_s}"),
            *(f"--journal={folder}/journal-{index}", f"--record-dir={folder}/record-{index}"),
            *(f"--max-num-seqs={rows}", f"--max-queued-requests={4 * case.streams}"),
            *(f"--max-queued-tokens={1 << 40}", f"--resume-keep-bytes={1 << 30}", f"--journal-bytes={1 << 30}"),
        ]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **DEFAULTS})
        stack.callback(process.wait)
        stack.callback(process.kill)
        found.append(_Scheduler(process, log))
        found[-1].await_line("scheduler is up" if index == 0 else "standby: waiting", case.timeout_s)
    return _Schedulers((found[0], found[1]), [(each[0], each[1]) for each in bases])


def main(arguments: Sequence[str]) -> int:
    """Print the results of several takeovers."""
    parser = argparse.ArgumentParser("python -m measure.scheduler.takeover", description=__doc__)
    default = Case()
    parser.add_argument("--workers", type=int, default=default.workers)
    parser.add_argument("--streams", type=int, default=default.streams)
    parser.add_argument("--frontends", type=int, default=default.frontends)
    parser.add_argument("--step-ms", type=float, default=default.step_ms)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--log", action="store_true", help="print the log of the new leader")
    options = parser.parse_args(arguments)
    case = Case(options.workers, options.streams, options.frontends, options.step_ms)
    results = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="quire-takeover-") as folder:
            result = measure(case, Path(folder))
        if options.log:
            print(result.log)
        found = {name: value for name, value in asdict(result).items() if name not in ("case", "log")}
        print(json.dumps(found), flush=True)
        results.append({**found, "case": asdict(case)})
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(each["wrong_tokens"] for each in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
