"""Runs `quire replay --set`: reads files, simulates, and returns a comparison."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from records.reader import read
from records.whatif.arrivals import read_load
from records.whatif.disk import ASSUMED_BYTES_PER_S
from records.whatif.figures import Figures
from records.whatif.load import Arrival, Member, most_members
from records.whatif.page import Comparison
from records.whatif.saved import Service, from_json, to_json
from records.whatif.settings import Changed, change
from records.whatif.simulate import Simulated, simulate
from records.whatif.step_times import StepTimes, StepTimesError, learn
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.errors import InvalidLimitsError
from shared.config import ConfigError

MOST_WORKERS = 1000
_FEW_POSITIONS = 200
"""With fewer known draft outcomes than this, the page shows a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests, the service to simulate, and, if recorded, the results of the original run."""

    arrivals: Sequence[Arrival]
    service: Service
    recorded: Figures | None = None
    """Results of the recorded run; None if the requests come from a trace."""
    notes: tuple[str, ...] = ()


def from_record(place: Path, step_times: Path | None = None) -> Case:
    """Return the case in a record.

    Args:
        place: segment, or folder of segments.
        step_times: file with step times that replace those in the record.

    Raises:
        ValueError: a file cannot be read or simulated; subclasses say why.
        OSError: a file cannot be read.
    """
    recorded = read_load(read(place))
    load = recorded.load
    if step_times is None:
        times, acceptance = learn(recorded.samples, recorded.begin, recorded.disk_samples), recorded.acceptance
    else:
        other = read_service(step_times)
        times, acceptance = other.times, recorded.acceptance or other.acceptance
        if not times.largest.drafts:
            acceptance = None
    notes = []
    if recorded.skipped_parts:
        notes.append(f"note: {recorded.skipped_parts} parts of the record are not used: other runs, or before a gap")
    return Case(
        arrivals=load.arrivals,
        service=Service(config=load.config, members=load.members, times=times, acceptance=acceptance),
        recorded=recorded.figures,
        notes=tuple(notes),
    )


def read_service(path: Path) -> Service:
    """Return the service in a file that `save` wrote.

    Raises:
        StepTimesError: the file is something else.
        OSError: the file cannot be read.
    """
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise StepTimesError(f"{path}: not a file of step times; write one with --learn-step-times") from None


def save(service: Service, path: Path) -> None:
    """Write a service into a file.

    Raises:
        OSError: the file cannot be written.
    """
    # Ignore the recorded slowdowns, because they occurred at certain times of the recorded run and do not apply to
    # another load.
    service = dataclasses.replace(service, times=dataclasses.replace(service.times, pace=()))
    path.write_text(to_json(service) + "\n", encoding="utf-8")


def compare(case: Case, settings: Sequence[str], *, workers: int | None = None, seed: int = 0) -> Comparison:
    """Simulate a case with its own settings and with changed ones.

    Args:
        case: the requests and the service.
        settings: changes of the form `name=value`.
        workers: number of workers; None for the case's own workers, which join and leave at their recorded times.
        seed: seed for the random variation of step times.

    Raises:
        ConfigError: a setting is invalid.
        SimulationError: the case cannot be served with these settings.
    """
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(f"workers: {workers} is out of range; use 1 to {MOST_WORKERS}")
    service = case.service

    def run(members: Sequence[Member], config: CoreConfig) -> Simulated:
        return simulate(case.arrivals, members, config, service.times, acceptance=service.acceptance, seed=seed)

    try:
        changed = change(service.config, settings)
    except InvalidLimitsError as error:
        raise ConfigError(f"set: {error}") from None
    members = fleet(service.members, workers, changed)
    notes = [*case.notes, *_notes_on_drafts(service, changed), *notes_on_disks(service.times, members)]
    is_changed = bool(settings) or workers is not None
    return Comparison(
        changes=list(settings),
        workers=(most_members(service.members), most_members(members)),
        recorded=case.recorded,
        simulated=run(service.members, service.config),
        changed=run(members, changed.config) if is_changed else None,
        times=service.times,
        notes=notes,
    )


def _notes_on_drafts(service: Service, changed: Changed) -> Iterator[str]:
    """Yield notes for the page about drafts.

    Raises:
        ConfigError: the settings enable drafts, but the record has no data on drafts.
    """
    if service.acceptance is None:
        if changed.of_workers.get("max_draft_tokens"):
            raise ConfigError(
                "set: speculative_tokens: neither the acceptance nor the time of drafts is known; use a record of"
                " workers with --speculation, or the --step-times of one"
            )
        if any(member.hello.max_draft_tokens for member in service.members):
            yield "note: simulated without drafts: the record or the step times have none"
    elif service.acceptance.positions < _FEW_POSITIONS:
        yield f"caution: the acceptance of drafts was learned from {service.acceptance.positions} positions only"


def notes_on_disks(times: StepTimes, members: Iterable[Member]) -> Iterator[str]:
    """Yield notes for the page about disks."""
    if times.disk is None and any(member.hello.num_disk_blocks for member in members):
        yield f"caution: the record has no copies from or to a disk; {ASSUMED_BYTES_PER_S / 1e9:g} GB/s are assumed"


def fleet(recorded: Sequence[Member], workers: int | None, changed: Changed) -> list[Member]:
    """Return a simulation's workers; with `workers`, that many copies, cycling through the recorded ones."""
    if workers is None:
        return [dataclasses.replace(member, hello=changed.apply(member.hello)) for member in recorded]
    hellos = list({member.hello.worker_id: changed.apply(member.hello) for member in recorded}.values())
    return [Member(hello=hellos[number % len(hellos)]) for number in range(workers)]
