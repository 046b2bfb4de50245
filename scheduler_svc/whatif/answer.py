"""The question of `quire replay --set`: from files to a comparison."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from scheduler_svc.core.interface.errors import InvalidLimitsError
from scheduler_svc.recorder.reader import read
from scheduler_svc.whatif.arrivals import read_load
from scheduler_svc.whatif.load import Member, most_members
from scheduler_svc.whatif.page import Comparison
from scheduler_svc.whatif.settings import Changed, change
from scheduler_svc.whatif.simulate import simulate
from scheduler_svc.whatif.step_times import learn
from shared.config import ConfigError

MOST_WORKERS = 1000


def compare(place: Path, settings: Sequence[str], *, workers: int | None = None, seed: int = 0) -> Comparison:
    """Simulate a record with its own settings and with changed ones.

    Args:
        place: segment, or folder of segments.
        settings: changes of the form `name=value`.
        workers: number of workers; None: those of the record, joining and leaving as they did.
        seed: seed of the scatter of step times.

    Raises:
        ConfigError: a setting is invalid.
        ValueError: the record cannot be read or simulated; subclasses say why.
        OSError: a file cannot be read.
    """
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(f"workers: {workers} is out of range; give 1 to {MOST_WORKERS}")
    recorded = read_load(read(place))
    load = recorded.load
    try:
        changed = change(load.config, settings)
    except InvalidLimitsError as error:
        raise ConfigError(f"set: {error}") from None
    times = learn(recorded.samples)
    as_recorded = simulate(load.arrivals, load.members, load.config, times, seed=seed)
    members = fleet(load.members, workers, changed)
    is_changed = bool(settings) or workers is not None
    skipped = recorded.skipped_parts
    return Comparison(
        changes=list(settings),
        workers=(most_members(load.members), most_members(members)),
        recorded=recorded.figures,
        simulated=as_recorded,
        changed=simulate(load.arrivals, members, changed.config, times, seed=seed) if is_changed else None,
        times=times,
        notes=[f"note: {skipped} parts of the record are not used: other runs, or before a gap"] if skipped else [],
    )


def fleet(recorded: Sequence[Member], workers: int | None, changed: Changed) -> list[Member]:
    """Return the workers of a simulation: like the recorded ones, in turn."""
    if workers is None:
        return [dataclasses.replace(member, hello=changed.apply(member.hello)) for member in recorded]
    hellos = list({member.hello.worker_id: changed.apply(member.hello) for member in recorded}.values())
    return [Member(hello=hellos[number % len(hellos)]) for number in range(workers)]
