"""Records of simulated runs, written as the recorder's thread does."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from checks.sim.coverage import Coverage
from checks.sim.scenario import Scenario, draw
from checks.sim.simulation import Result, Simulation
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.events import Event
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recorder.code import code_hash
from scheduler_svc.recorder.encoding import Encoder
from scheduler_svc.recorder.segments import FORMAT_VERSION, SegmentWriter
from scheduler_svc.recorder.snapshot import dump
from scheduler_svc.recorder.tags import Tagger
from scheduler_svc.recorder.tape import Cut, RecordedScheduler, Tape


class Recording:
    """Writes the records of all cores in a simulation, at least one segment per core."""

    def __init__(self, folder: Path, *, with_tokens: bool = False, cut_every: int = 0) -> None:
        self._folder = folder
        self._with_tokens = with_tokens
        self._cut_every = cut_every
        self._tagger = Tagger()
        self._number = 0
        self._tape: Tape | None = None
        self._writer: SegmentWriter
        self.num_bytes = 0

    def make_core(self, config: CoreConfig, incarnation: int, now: float = 0.0) -> Scheduler:
        """Make a core whose calls are written from `now` on."""
        self.finish()
        self._tape = Tape()
        self._config, self._incarnation = config, incarnation
        self._encoder = Encoder(self._tagger, with_tokens=self._with_tokens)
        self._begin(now, b"")
        return _Cutting(config, incarnation, self._tape, self._cut)

    def _cut(self, core: Scheduler, now: float) -> None:
        assert self._tape is not None
        if self._cut_every and len(self._tape.items) >= self._cut_every:
            core.tidy()
            self._tape.cut(now)
            self._write()
            self._begin(now, dump(core, self._tagger, with_tokens=self._with_tokens))

    def finish(self) -> None:
        """Write what is left."""
        if self._tape is not None:
            self._write()
            self._writer.close()
            self.num_bytes += self._writer.size
            self._tape = None

    def _begin(self, now: float, snapshot: bytes) -> None:
        if snapshot:
            self._writer.close()
            self.num_bytes += self._writer.size
        self._number += 1
        opening = self._encoder.begin(now)
        batch = self._encoder.take()
        opening.version, opening.code, opening.fresh = FORMAT_VERSION, code_hash(), not snapshot
        opening.unix_ns = opening.core_ns
        opening.config, opening.incarnation = json.dumps(dataclasses.asdict(self._config)), self._incarnation
        batch.opening.CopyFrom(opening)
        batch.snapshot, batch.snapshot_complete = snapshot, bool(snapshot)
        self._writer = SegmentWriter.create(self._folder / f"{self._number:012d}.record")
        self._writer.write(batch)

    def _write(self) -> None:
        assert self._tape is not None
        items = [item for item in self._tape.items if not isinstance(item, Cut)]
        self._tape.items.clear()
        for start in range(0, len(items), 500):
            self._encoder.encode(items[start : start + 500])
            self._writer.write(self._encoder.take())


class _Cutting(RecordedScheduler):
    """A recorded core whose record is cut between its calls."""

    def __init__(
        self, config: CoreConfig, incarnation: int, tape: Tape, cut: Callable[[Scheduler, float], None]
    ) -> None:
        super().__init__(config, incarnation, tape)
        self._tape_cut = cut

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._tape_cut(self, now)
        return super().handle(event, now)

    def plan(self, peer: Peer, now: float) -> tuple[Plan | None, list[Effect]]:
        self._tape_cut(self, now)
        return super().plan(peer, now)


def record(
    folder: Path, seed: int, steps: int, *, with_tokens: bool = False, cut_every: int = 0
) -> tuple[Result, Recording]:
    """Record the simulation of a seed, with its faults."""
    return record_scenario(folder, draw(seed), steps, with_tokens=with_tokens, cut_every=cut_every)


def record_scenario(
    folder: Path, scenario: Scenario, steps: int, *, with_tokens: bool = False, cut_every: int = 0
) -> tuple[Result, Recording]:
    """Record the simulation of a scenario."""
    recording = Recording(folder, with_tokens=with_tokens, cut_every=cut_every)
    simulation = Simulation(scenario, Coverage(), make_core=recording.make_core)
    result = simulation.run(steps)
    recording.finish()
    return result, recording
