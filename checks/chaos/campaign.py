"""Campaign that injects faults into the workers of a service under load and checks every stream.

As soon as two workers serve, and at most every `pause_s`, a fault hits a random worker. The scheduler's log shows which
streams were hit and when the fault was detected. The streams show when they continued.
"""

import asyncio
import contextlib
import enum
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from checks.chaos import pressure
from checks.chaos.load import Load, Streamed, check
from checks.chaos.proxy import Wires
from checks.oracle import Oracle, Tally
from measure.spread import Spread
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, arguments_of, serve

HOOKS = Path(__file__).parent / "hooks"
NUM_WORKERS = 3
STEP_DEADLINE_S = 3.0
WATCHDOG_S = 3.0
SILENCE_TIMEOUT_S = 2.5
"""Time for which a cut connection stays cut, and every second frozen process stays frozen."""
PATIENCE_S = 120.0
_TOKEN_BYTES = 512
"""Bytes of the KV of a token in the checkpoint of `LlamaForCausalLM`, in float32."""


class Fault(enum.Enum):
    """Kinds of worker faults."""

    KILL = "SIGKILL"
    FREEZE = "SIGSTOP"
    HANG = "hang"
    CUT = "network cut"


@dataclass(frozen=True, slots=True)
class Campaign:
    """Size and duration of a campaign."""

    num_streams: int
    faults_of_each_kind: int
    max_tokens: int
    pause_s: float = 2.0
    seed: int = 0
    frontends: int = 1
    ranks: int = 1
    """Processes per worker. Faults other than a cut hit any of them."""
    speculation: str = "off"
    """How workers propose draft tokens."""
    minutes: float = 0.0
    """Duration of the campaign. 0: `faults_of_each_kind` ends it."""
    busy: int = 0
    """Number of other processes that compute all the time."""
    disk: Path | None = None
    """Folder for the journal and the record, on a file system that is alternately filled and freed; or None."""
    architecture: str = "LlamaForCausalLM"
    """Class of the model in `transformers`."""
    tiers: Path | None = None
    """Folder of the disk cache; None for none. With it, conversations exceed the KV cache and host memory."""

    @property
    def patience_s(self) -> float:
        """Time in which two workers must serve, and the first token must arrive."""
        return PATIENCE_S * (1 + self.busy / (os.cpu_count() or 1))


@dataclass(slots=True)
class Strike:
    """One injected fault: its time and its target."""

    fault: Fault
    worker: str
    time: float
    noticed: float | None = None
    """Time at which the scheduler declared the worker lost. All times are from `time.time()`."""
    request_ids: list[str] = field(default_factory=list)
    """Streams that ran on the worker."""
    served_again: float | None = None
    """Time at which the worker had reconnected."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause of one stream, from the fault to its next token, in seconds."""

    to_notice: float
    queued: float
    """Time from detection until a plan on any worker contains the stream."""
    prefill: float
    """Time from that plan to the next token: recomputing prompt and output concurrently with the worker's other
    rows.
    """

    @property
    def whole(self) -> float:
        """Time from the fault to the next token."""
        return self.to_notice + self.queued + self.prefill


@dataclass(slots=True)
class Outcome:
    """Result of a campaign."""

    strikes: list[Strike]
    streams: list[Streamed]
    tally: Tally
    seconds: float

    def pauses(self, strikes: Sequence[Strike]) -> list[Pause]:
        """Return the pause of every affected stream whose history is known and that still expected tokens."""
        by_id = {streamed.request_id: streamed for streamed in self.streams}
        found = []
        for strike in strikes:
            for request_id in strike.request_ids:
                pause = _pause(strike, by_id[request_id])
                if pause is not None:
                    found.append(pause)
        return found

    def figures(self) -> dict[str, Any]:
        """Return the results as JSON: times from each fault to detection, next tokens and the worker's return."""
        return {
            "faults": len(self.strikes),
            "streams": len(self.streams),
            "streams_by_kind": {
                "greedy": sum(1 for each in self.streams if each.seed is None and each.schema is None),
                "seeded": sum(1 for each in self.streams if each.seed is not None and each.schema is None),
                "schema, greedy": sum(1 for each in self.streams if each.seed is None and each.schema is not None),
                "schema, seeded": sum(1 for each in self.streams if each.seed is not None and each.schema is not None),
            },
            "tokens": sum(len(streamed.tokens) for streamed in self.streams),
            "streams_hit": sum(1 for streamed in self.streams if preemptions(streamed)),
            "schema_streams_hit": sum(1 for each in self.streams if preemptions(each) and each.schema is not None),
            "failed": sum(1 for streamed in self.streams if streamed.error is not None),
            "near_ties": self.tally.near_ties,
            "seconds": round(self.seconds, 1),
            "pauses": _itemised(self.pauses(self.strikes)),
            "by_kind": {
                kind.value: self._figures_of([each for each in self.strikes if each.fault is kind]) for kind in Fault
            },
        }

    def _figures_of(self, strikes: Sequence[Strike]) -> dict[str, Any]:
        return {
            "faults": len(strikes),
            "to_notice_s": quantiles([each.noticed - each.time for each in strikes if each.noticed is not None]),
            "pauses": _itemised(self.pauses(strikes)),
            "to_worker_back_s": quantiles(
                [each.served_again - each.time for each in strikes if each.served_again is not None]
            ),
        }


def _pause(strike: Strike, streamed: Streamed) -> Pause | None:
    lost = f"lost {strike.worker}:"
    story = iter(streamed.story)
    noticed = next((at for at, what in story if at >= strike.time and what.startswith(lost)), None)
    admitted = next((at for at, what in story if what.startswith("admitted to")), None)
    if noticed is None or admitted is None:
        return None
    # Tokens sent before the fault still arrive. Tokens after the readmission were recomputed.
    token = streamed.next_token_after(admitted)
    return None if token is None else Pause(noticed - strike.time, admitted - noticed, token - admitted)


def _itemised(pauses: Sequence[Pause]) -> dict[str, Any]:
    return {
        "to_next_token_s": quantiles([pause.whole for pause in pauses]),
        "without_prefill_s": quantiles([pause.to_notice + pause.queued for pause in pauses]),
        "to_notice_s": quantiles([pause.to_notice for pause in pauses]),
        "queued_s": quantiles([pause.queued for pause in pauses]),
        "prefill_s": quantiles([pause.prefill for pause in pauses]),
    }


def quantiles(values: list[float]) -> dict[str, float | int]:
    """Return median, 99th percentile and maximum."""
    spread = Spread.of(values)
    return {"n": spread.count, **(spread.named("p50", "p99", "max", digits=4) if values else {})}


def preemptions(streamed: Streamed) -> int:
    """Return how often a stream was interrupted."""
    return streamed.finished.usage.preemptions if streamed.finished is not None else 0


@contextlib.contextmanager
def service(checkpoint: Path, *flags: str, environ: dict[str, str] | None = None) -> Iterator[tuple[Served, Wires]]:
    """Start three workers behind proxies, with fault hooks."""
    # Unix socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="qc-", dir="/tmp") as folder:
        target = Path(folder) / "scheduler"
        wires = Wires(Path(folder), [f"worker-{index}" for index in range(NUM_WORKERS)], target)
        environment = {"PYTHONPATH": str(HOOKS), "CHAOS_PROXIES": folder, **(environ or {})}
        try:
            with serve(
                checkpoint,
                "--dtype=float32",
                f"--workers={NUM_WORKERS}",
                f"--worker-address=ipc://{target}",
                f"--step-deadline-s={STEP_DEADLINE_S}",
                f"--watchdog-s={WATCHDOG_S}",
                "--worker-silence-s=2",
                *flags,
                environ=environment,
            ) as served:
                yield served, wires
        finally:
            wires.close()


def run(campaign: Campaign, folder: Path) -> Outcome:
    """Run a campaign and check every stream; raise AssertionError if a stream is wrong."""
    checkpoint = make_checkpoint(campaign.architecture, folder / "model")
    oracle = Oracle(checkpoint)
    began = time.monotonic()
    # The remaining workers have room for all streams, so the times include no queueing.
    folders = ("journal", "record-dir") if campaign.disk is not None else ()
    with (
        service(
            checkpoint,
            f"--max-num-seqs={max(64, campaign.num_streams)}",
            # Every step of a tiny model takes about the same time.
            "--max-num-batched-tokens=2048",
            f"--frontends={campaign.frontends}",
            f"--tensor-parallel-size={campaign.ranks}",
            f"--speculation={campaign.speculation}",
            *(f"--{name}={campaign.disk}/{name}" for name in folders),
            *_tiers(campaign),
        ) as (served, wires),
    ):
        resumable = campaign.disk is not None
        load = Load(
            served.grpc,
            campaign.num_streams,
            oracle.vocab_size,
            campaign.max_tokens,
            campaign.seed,
            resumable=resumable,
        )
        if campaign.tiers is not None:
            load.turns, load.constrained_share = 4, 0.0  # Outputs that end by a schema are too long for more turns.
        full_disk = contextlib.nullcontext() if campaign.disk is None else pressure.full_disk(campaign.disk)
        with pressure.busy(campaign.busy), full_disk:
            strikes = asyncio.run(_strike_under_load(campaign, served, wires, load))
        served.wait_until_empty()
        if campaign.tiers is not None:
            for tier in ("host", "disk"):
                hits = served.metric("quire_prefix_cache_hit_tokens_total", tier=tier)
                assert hits > 0, f"no cached token was in the tier {tier}"
        _read_log(served.log_lines(), strikes)
    tally = Tally()
    for streamed in load.done:
        check(oracle, streamed, tally)
    assert tally.near_ties * 1000 < tally.tokens, tally
    return Outcome(strikes, load.done, tally, time.monotonic() - began)


def _tiers(campaign: Campaign) -> tuple[str, ...]:
    """Return settings with which a third of the streams fit into a worker, and a third into its host memory."""
    if campaign.tiers is None:
        return ()
    num_bytes = campaign.num_streams * campaign.max_tokens * _TOKEN_BYTES
    return (
        f"--kv-cache-memory={num_bytes}",
        f"--host-cache={num_bytes}",
        f"--disk-cache={campaign.tiers}",
        "--disk-cache-bytes=256MiB",
    )


async def _strike_under_load(campaign: Campaign, served: Served, wires: Wires, load: Load) -> list[Strike]:
    rng = random.Random(campaign.seed)
    faults = list(Fault) * campaign.faults_of_each_kind
    rng.shuffle(faults)
    until = time.monotonic() + 60 * campaign.minutes
    streaming = asyncio.create_task(load.run())
    strikes: list[Strike] = []
    healing: list[asyncio.Task[None]] = []
    try:
        await asyncio.wait_for(load.flows.wait(), campaign.patience_s)
        for fault in itertools.cycle(faults) if campaign.minutes else faults:
            if campaign.minutes and time.monotonic() > until:
                break
            workers = await _serving(served, streaming, campaign.patience_s)
            name, pid = rng.choice(workers)
            if campaign.ranks > 1:
                pid = rng.choice([pid, *(child.pid for child in psutil.Process(pid).children())])
            strikes.append(Strike(fault, name, time.time()))
            healing.append(asyncio.create_task(_strike(fault, name, pid, wires, stays=rng.random() < 0.5)))
            await asyncio.wait({streaming}, timeout=campaign.pause_s)
    finally:
        load.stop()
        await asyncio.gather(*healing)
        await streaming
    return strikes


async def _serving(served: Served, streaming: "asyncio.Task[None]", patience_s: float) -> list[tuple[str, int]]:
    """Return the workers in a valid epoch with their process IDs, once there are two."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end and not streaming.done():
        found = {
            line["worker"]: line["event"] == "worker joined"
            for line in await asyncio.to_thread(served.log_lines)
            if line["event"] in ("worker joined", "worker lost", "worker left")
        }
        pids = {_worker_name(arguments_of(child)): child.pid for child in served.children("worker")}
        serving = [(name, pids[name]) for name, joined in found.items() if joined and name in pids]
        if len(serving) >= 2:
            return serving
        await asyncio.sleep(0.1)
    raise AssertionError("no two workers serve")


def _worker_name(arguments: list[str]) -> str:
    return next((each.partition("=")[2] for each in arguments if each.startswith("--worker-id=")), "")


async def _strike(fault: Fault, name: str, pid: int, wires: Wires, *, stays: bool) -> None:
    """Inject a fault. After a while, repair it unless it heals by itself or the supervisor repairs it."""
    with contextlib.suppress(ProcessLookupError):
        match fault:
            case Fault.KILL:
                os.kill(pid, signal.SIGKILL)
            case Fault.HANG:
                os.kill(pid, signal.SIGUSR1)
            case Fault.FREEZE:
                os.kill(pid, signal.SIGSTOP)
                if not stays:
                    await asyncio.sleep(SILENCE_TIMEOUT_S)
                    os.kill(pid, signal.SIGCONT)
            case Fault.CUT:
                wires.cut(name)
                await asyncio.sleep(SILENCE_TIMEOUT_S)
                wires.mend(name)


def _read_log(lines: Sequence[dict[str, Any]], strikes: Sequence[Strike]) -> None:
    """Find when the scheduler detected each fault, its target, and when the worker was back."""
    of_worker: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for line in lines:
        if line.get("service") == "quire-scheduler" and "worker" in line:
            at = datetime.fromisoformat(line["timestamp"]).timestamp()
            of_worker.setdefault(line["worker"], []).append((at, line))
    for strike in strikes:
        for at, line in of_worker.get(strike.worker, []):
            if at < strike.time:
                continue
            if line["event"] == "worker lost; its requests wait for another worker" and not strike.request_ids:
                strike.request_ids = line["request_ids"]
            elif line["event"] == "worker lost" and strike.noticed is None:
                strike.noticed = at
            elif line["event"] == "worker joined":
                strike.served_again = at
                break
