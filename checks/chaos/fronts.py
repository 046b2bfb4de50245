"""Campaign that kills front ends and schedulers under load, singly and together, while clients continue with Resume.

    python -m checks.chaos.fronts --json fronts.json

The service has two workers, two front ends and a journal. Once every live stream has received a token since the last
kill, the campaign kills a front end, all front ends, the scheduler, or scheduler and front ends at once. It checks each
stream token by token.
"""

import asyncio
import enum
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from checks.chaos import command
from checks.chaos.campaign import PATIENCE_S, quantiles
from checks.chaos.load import Load, Streamed, check
from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from shared.process_watch import ProcessWatch

CONNECTIONS = 8


class Kill(enum.Enum):
    """The processes that are killed."""

    FRONTEND = "a front end"
    FRONTENDS = "all front ends"
    SCHEDULER = "the scheduler"
    BOTH = "scheduler and front ends"


@dataclass(frozen=True, slots=True)
class Campaign:
    """Size and duration of a campaign."""

    num_streams: int
    kills_of_each_kind: int
    max_tokens: int
    fsync: str = "none"
    standby: bool = False
    kinds: tuple[Kill, ...] = tuple(Kill)
    pause_s: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class KillRecord:
    """The moment of one kill, and the streams that were live."""

    time: float
    """Time of the kill, from `time.time()`."""
    live: list[Streamed] = field(default_factory=list)
    """Streams in progress."""


@dataclass(slots=True)
class Outcome:
    """Result of a campaign."""

    kills: list[tuple[Kill, KillRecord]]
    streams: list[Streamed]
    tally: Tally
    seconds: float

    def figures(self) -> dict[str, Any]:
        """Return the results as JSON."""
        pauses: dict[Kill, list[float]] = {kill: [] for kill in Kill}
        for (kill, _), found in zip(self.kills, longest_pauses([record for _, record in self.kills]), strict=True):
            pauses[kill] += found
        return {
            "kills": len(self.kills),
            "streams": len(self.streams),
            "tokens": sum(len(streamed.tokens) for streamed in self.streams),
            "tokens_compared": self.tally.tokens,
            "near_ties": self.tally.near_ties,
            "failed": sum(streamed.error is not None for streamed in self.streams),
            "seconds": round(self.seconds, 1),
            "pause_s": {kill.value: quantiles(values) for kill, values in pauses.items()},
        }


def longest_pauses(records: Sequence[KillRecord]) -> list[list[float]]:
    """Return the pause of each live stream for each kill, in seconds.

    A stream's pause is its longest gap between two messages, from the last message before a kill until the next kill.
    """
    pauses = []
    for record, following in zip_longest(records, records[1:]):
        until = following.time if following is not None else math.inf
        gaps = [[b - a for a, b in pairwise(each.times) if b > record.time and a < until] for each in record.live]
        pauses.append([max(found, default=0.0) for found in gaps])
    return pauses


def run(campaign: Campaign, folder: Path) -> Outcome:
    """Run a campaign; raise AssertionError if a stream is wrong."""
    checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model")
    oracle = Oracle(checkpoint)
    began = time.monotonic()
    with serve(
        checkpoint,
        "--dtype=float32",
        "--workers=2",
        "--frontends=2",
        f"--max-num-seqs={max(64, campaign.num_streams)}",
        f"--journal={folder / 'journal'}",
        f"--journal-fsync={campaign.fsync}",
        *(["--standby", f"--leader-lease={folder / 'leader'}"] if campaign.standby else []),
    ) as served:
        load = Load(
            served.grpc,
            campaign.num_streams,
            oracle.vocab_size,
            campaign.max_tokens,
            campaign.seed,
            resumable=True,
            connections=CONNECTIONS,
        )
        kills = asyncio.run(_kill_under_load(campaign, served, load, folder / "leader"))
        served.wait_until_empty()
        assert served.metric("quire_journal_failures_total") == 0
    tally = Tally()
    for streamed in load.done:
        check(oracle, streamed, tally)
    assert tally.near_ties * 1000 < tally.tokens, tally
    return Outcome(kills, load.done, tally, time.monotonic() - began)


async def _kill_under_load(
    campaign: Campaign, served: Served, load: Load, lease: Path
) -> list[tuple[Kill, KillRecord]]:
    rng = random.Random(campaign.seed)
    kills = [kill for kill in campaign.kinds for _ in range(campaign.kills_of_each_kind)]
    rng.shuffle(kills)
    streaming = asyncio.create_task(load.run())
    records: list[tuple[Kill, KillRecord]] = []
    try:
        await asyncio.wait_for(load.flows.wait(), PATIENCE_S)
        for kill in kills:
            await until_all_get_on(load, records[-1][1].time if records else time.time())
            await asyncio.wait({streaming}, timeout=campaign.pause_s)
            if streaming.done():
                break
            record = KillRecord(time.time(), [each for each in load.live.values() if each.tokens])
            records.append((kill, record))
            for pid in _victims(kill, served, rng, lease if campaign.standby else None):
                os.kill(pid, signal.SIGKILL)
        await until_all_get_on(load, records[-1][1].time)
    finally:
        load.stop()
        await streaming
    return records


def _victims(kill: Kill, served: Served, rng: random.Random, lease: Path | None) -> list[int]:
    frontends = [child.pid for child in served.children("frontend")]
    scheduler = [child.pid for child in served.children("scheduler")]
    match kill:
        case Kill.FRONTEND:
            return [rng.choice(frontends)]
        case Kill.FRONTENDS:
            return frontends
        case Kill.SCHEDULER:
            return scheduler if lease is None else [leader_pid(lease)]
        case Kill.BOTH:
            return scheduler + frontends


def leader_pid(lease: Path) -> int:
    """Wait until one of the schedulers with this lease file leads; return the leader's process id."""
    end = time.monotonic() + PATIENCE_S
    while (watch := ProcessWatch.open(process := lease.read_text().partition("\n")[0])) is None or watch.is_dying():
        if time.monotonic() > end:
            raise AssertionError("no scheduler leads")
        time.sleep(0.02)
    watch.close()
    return int(process.split("/")[-2])


async def until_all_get_on(load: Load, moment: float) -> None:
    """Wait until every live stream has received a token since a given time."""
    end = time.monotonic() + PATIENCE_S
    while not all(streamed.times and streamed.times[-1] > moment for streamed in load.live.values()):
        if time.monotonic() > end:
            raise AssertionError("streams make no progress")
        await asyncio.sleep(0.05)


def main() -> int:
    """Run one campaign; print and store its results."""
    parser = command.parser("checks.chaos.fronts", __doc__)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--kills-of-each-kind", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--fsync", default="none")
    parser.add_argument("--standby", action="store_true", help="run a standby scheduler")
    parser.add_argument("--kills", nargs="*", choices=[kill.name.lower() for kill in Kill], help="kinds; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    campaign = Campaign(
        num_streams=options.streams,
        kills_of_each_kind=options.kills_of_each_kind,
        max_tokens=options.max_tokens,
        fsync=options.fsync,
        standby=options.standby,
        kinds=tuple(Kill[name.upper()] for name in options.kills or Kill.__members__),
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as folder:
        command.tell(run(campaign, Path(folder)).figures(), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
