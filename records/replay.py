"""Replay: runs the scheduler core over a record and compares its plans with the recorded plans."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from records.reader import Segment
from records.values import (
    AdmissionDigest,
    DiskJobSent,
    Entry,
    FrontendReported,
    PlanAsked,
    PlanDigest,
    digest,
)
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.interface.config import BatchingLimits, CoreConfig, RequestClass, TenantLimits
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.records import Note, Peer, QueueNote, RequestEnded
from scheduler_svc.core.memory.partial_blocks import PartialMatch
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recorder.snapshot import load
from scheduler_svc.recorder.tags import TAG_BYTES, to_keys
from scheduler_svc.recorder.tape import Facts
from shared.prefix_keys import KEY_BYTES, BlockKey


class ReplayError(ValueError):
    """A record cannot be replayed."""


class FactsRunOutError(Exception):
    """The core asks for more facts than were recorded, because its decisions differ from the recorded ones."""


class RecordedFacts(TokenFacts):
    """Token facts read back from a record, in order."""

    def __init__(self) -> None:
        self._keys = bytearray()
        self._partial: list[PartialMatch | None] = []
        self._num_partial = 0
        self._stopped: list[int] = []
        self._held: list[int] = []
        self._num_held = 0
        self._num_false = 0

    def add(self, facts: Facts | None) -> None:
        """Add the facts of the next entry."""
        self._stopped = []
        if facts is None:
            return
        self._keys += facts.keys
        if self._num_partial:
            del self._partial[: self._num_partial]
            self._num_partial = 0
        self._partial += facts.partial
        if self._num_held:
            del self._held[: self._num_held]
            self._num_held = 0
        self._held += facts.held
        self._stopped = list(facts.stopped)

    def cut(self) -> None:
        """Reset the counters, as the recorder does at the beginning of a segment."""
        self._num_false = 0

    def following_keys(self, parent: BlockKey, tokens: bytes, block_size: int) -> bytes:
        size = len(tokens) // (4 * block_size) * TAG_BYTES
        if len(self._keys) < size:
            raise FactsRunOutError(f"block keys: {size // TAG_BYTES} asked, {len(self._keys) // TAG_BYTES} recorded")
        keys = bytes(self._keys[:size])
        del self._keys[:size]
        return to_keys(keys)

    def partial(self, match: PartialMatch | None) -> PartialMatch | None:
        if self._num_partial >= len(self._partial):
            raise FactsRunOutError("partial matches: more requested than recorded")
        self._num_partial += 1
        return self._partial[self._num_partial - 1]

    def stopped(self, positions: IndexArray) -> IndexArray:
        stopped, self._stopped = self._stopped, []
        return np.array(stopped, np.intp)

    def holds(self, condition: bool) -> bool:
        if self._num_held < len(self._held) and self._held[self._num_held] == self._num_false:
            self._num_held += 1
            self._num_false = 0
            return True
        self._num_false += 1
        return False


assert KEY_BYTES >= TAG_BYTES


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a record and its replay."""

    index: int
    """Entry of the record."""
    time: float
    what: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A part of a record that a replay cannot compare."""

    what: str
    """The entries concerned, and why they cannot be compared."""
    since_unix_s: float
    """Wall clock time of the last entry before this part, s."""
    until_unix_s: float | None
    """Wall clock time of the first entry after this part; None if nothing follows."""


@dataclass(slots=True)
class Outcome:
    """Outcome of a replay."""

    entries: int = 0
    calls: int = 0
    """Number of calls to the core."""
    plans: int = 0
    """Number of plans compared."""
    steps: int = 0
    """Number of step results from workers."""
    ends: int = 0
    """Number of request ends compared."""
    difference: Difference | None = None
    missing: list[Missing] = field(default_factory=list)
    """Parts that could not be compared, in order."""


def replay(segments: Iterable[Segment], *, to: int | None = None) -> Outcome:
    """Run the core over segments, in order, up to the entry `to`; stop at the first difference.

    At a segment with a new core, the replay starts again. Where entries are missing, the replay continues at the next
    segment with a snapshot, and the outcome lists the missing part.

    Raises:
        ReplayError: no segment can be replayed.
        SnapshotError: a snapshot is not compatible with this code.
    """
    outcome = Outcome()
    run: _Run | None = None
    reader = _Continuity(outcome.missing)
    for segment in segments:
        reader.begins(segment)
        if run is not None and not run.goes_on_with(segment):
            run = None
        if run is None:
            run = _begin(segment)
            if run is None:
                reader.skipped(segment)
                continue
        else:
            run.facts.cut()
        for entry in segment:
            if to is not None and entry.index > to:
                return outcome
            reader.read(entry)
            outcome.difference = run.step(entry, outcome)
            if outcome.difference is not None:
                return outcome
        reader.ended(segment)
        if segment.left_out:
            run = None
    reader.close()
    if not outcome.entries:
        raise ReplayError(
            "record: no segment contains the start of a core or a complete snapshot; add earlier segments"
        )
    return outcome


class _Continuity:
    """Checks that entries follow each other without a gap, and adds each missing part to a list."""

    def __init__(self, missing: list[Missing]) -> None:
        self._missing = missing
        self._incarnation = self._next_index = -1
        self._to_wall = self._now = 0.0
        self._open: tuple[str, float] | None = None
        """Description and start of the missing part after the last entry; None if nothing is missing."""

    def begins(self, segment: Segment) -> None:
        """Compare the start of a segment with the end of the previous one."""
        opening = segment.opening
        wall = opening.unix_ns / 1e9
        is_same = opening.incarnation == self._incarnation
        if self._open is not None:
            what, since = self._open
            if is_same:
                what = f"{what}: entries {self._next_index} to {opening.first_index - 1}"
            self._missing.append(Missing(what, since, wall))
        elif is_same and opening.first_index != self._next_index:
            what = f"entries {self._next_index} to {opening.first_index - 1} are in no segment"
            self._missing.append(Missing(what, self._now + self._to_wall, wall))
        elif not is_same and self._incarnation >= 0 and not opening.fresh:
            what = f"entries 0 to {opening.first_index - 1} of the next scheduler are in no segment"
            self._missing.append(Missing(what, self._now + self._to_wall, wall))
        self._open = None
        self._incarnation, self._next_index = opening.incarnation, opening.first_index
        self._to_wall, self._now = wall - opening.core_time, opening.core_time

    def read(self, entry: Entry) -> None:
        """Note the next entry that was replayed."""
        self._next_index, self._now = entry.index + 1, entry.time

    def skipped(self, segment: Segment) -> None:
        """Note a segment that was skipped, because no replay can start from it."""
        begin = self._now + self._to_wall
        last = None
        for last in segment:
            self.read(last)
        if last is not None:
            first = segment.opening.first_index
            what = (
                f"{segment.path.name}: entries {first} to {last.index} were not compared, because there is no snapshot"
            )
            self._missing.append(Missing(what, begin, self._now + self._to_wall))
        self.ended(segment)

    def ended(self, segment: Segment) -> None:
        """Note the end of a segment."""
        if segment.left_out:
            what = f"{segment.path.name}: its last {segment.left_out:,} bytes are damaged or incomplete"
            self._open = what, self._now + self._to_wall

    def close(self) -> None:
        """Note the end of the record."""
        if self._open is not None:
            self._missing.append(Missing(*self._open, None))


def _begin(segment: Segment) -> "_Run | None":
    facts = RecordedFacts()
    if segment.opening.fresh:
        return _Run(Scheduler(to_config(segment.opening.config), segment.opening.incarnation, facts), facts, segment)
    return _Run(load(segment.snapshot, facts), facts, segment) if segment.snapshot else None


class _Run:
    """The replay of one core."""

    def __init__(self, core: Scheduler, facts: RecordedFacts, segment: Segment) -> None:
        self._core = core
        self.facts = facts
        self._incarnation = segment.opening.incarnation
        self._next_index = segment.opening.first_index
        self._expected: list[Effect] = []
        """Recorded effects of the last call that the core must repeat."""
        self._workers: dict[Peer, str] = {}
        """Worker names, for describing a difference."""
        self._requests: dict[tuple[Peer, int], str] = {}
        """Ids of live requests, for describing a difference."""
        for event, _ in segment.opening.live:
            self._name(event)
        for state in segment.opening.workers:
            self._name(state.hello)

    def goes_on_with(self, segment: Segment) -> bool:
        """Return whether a segment follows without a gap."""
        opening = segment.opening
        return opening.incarnation == self._incarnation and opening.first_index == self._next_index

    def step(self, entry: Entry, outcome: Outcome) -> Difference | None:
        """Replay an entry; return the difference, if there is one."""
        outcome.entries += 1
        self._next_index = entry.index + 1
        what = entry.what
        if isinstance(what, Note | QueueNote | FrontendReported | DiskJobSent):
            return None
        if isinstance(what, RequestEnded | ef.WorkerWelcomed):
            return self._effect(entry, what, outcome)
        missing = self._missing(entry)
        if missing is not None:
            return missing
        self.facts.add(entry.facts)
        if what is None:
            self._core.tidy()
            return None
        outcome.calls += 1
        self._name(what)
        try:
            if isinstance(what, PlanAsked):
                plan, effects = self._core.plan(what.worker, entry.time)
                found = None if plan is None else digest(plan)
                if found != what.plan:
                    return Difference(entry.index, entry.time, self._compare(what, found))
                outcome.plans += found is not None
            else:
                effects = self._core.handle(what, entry.time)
                outcome.steps += type(what).__name__ == "StepDone"
        except FactsRunOutError as error:
            return Difference(entry.index, entry.time, str(error))
        self._expected = [each for each in effects if isinstance(each, RequestEnded | ef.WorkerWelcomed)]
        return None

    def _name(self, what: object) -> None:
        """Store the name of the worker or request that an event introduces."""
        if isinstance(what, ev.WorkerHello):
            self._workers[what.worker] = what.worker_id
        elif isinstance(what, ev.RequestArrived):
            self._requests[what.frontend, what.stream] = what.spec.request_id

    def _effect(self, entry: Entry, what: RequestEnded | ef.WorkerWelcomed, outcome: Outcome) -> Difference | None:
        recorded = self._essence(what)
        found = self._essence(self._expected.pop(0)) if self._expected else "nothing"
        if found != recorded:
            return Difference(entry.index, entry.time, f"recorded {recorded}, replayed {found}")
        if isinstance(what, RequestEnded):
            outcome.ends += 1
            self._requests.pop((what.frontend, what.stream), None)
        return None

    def _missing(self, entry: Entry) -> Difference | None:
        if not self._expected:
            return None
        return Difference(entry.index, entry.time, f"recorded nothing, replayed {self._essence(self._expected[0])}")

    def _essence(self, effect: Effect | str) -> str:
        """Return, as text, the properties in which an effect must equal the recorded one."""
        if isinstance(effect, RequestEnded):
            name = self._requests.get((effect.frontend, effect.stream), f"stream {effect.stream}")
            return (
                f"the end of {name}: {effect.reason.value}, {effect.completion_tokens} tokens,"
                f" {effect.cached_prompt_tokens} prompt tokens from the cache, {effect.preemptions} preemptions,"
                f" {effect.accepted_draft_tokens} of {effect.draft_tokens} drafts accepted, retry after"
                f" {effect.retry_ms} ms, {np.float32(effect.queued_s):.6g} s queued"
            )
        assert isinstance(effect, ef.WorkerWelcomed)
        return f"welcome of {self._workers.get(effect.worker, 'a worker')} with epoch {effect.epoch}"

    def _compare(self, asked: PlanAsked, found: PlanDigest | None) -> str:
        """Describe how a plan differs from the recorded plan."""
        recorded, worker = asked.plan, self._workers.get(asked.worker, "a worker")
        if recorded is None or found is None:
            present, absent = ("replayed", "recorded") if recorded is None else ("recorded", "replayed")
            plan = found if recorded is None else recorded
            assert plan is not None
            return f"step {plan.step} of {worker} was {present}, none {absent}"
        lines = [
            f"{each.name}: recorded {self._shown(one)}, replayed {self._shown(other)}"
            for each in dataclasses.fields(PlanDigest)
            if (one := getattr(recorded, each.name)) != (other := getattr(found, each.name))
        ]
        return f"step {recorded.step} of {worker}: " + "; ".join(lines)

    def _shown(self, value: object) -> str:
        """Return a plan field as text; admissions show the requests' ids."""
        if isinstance(value, tuple | list) and value and isinstance(value[0], AdmissionDigest):
            return "[" + ", ".join(f"{self._admitted(each)}" for each in value) + "]"
        return repr(value)

    def _admitted(self, each: AdmissionDigest) -> str:
        name = self._requests.get((each.frontend, each.stream), f"stream {each.stream}")
        computed = f"{each.num_computed_tokens} of {each.num_tokens} tokens computed"
        return f"{name} in row {each.row} ({computed}, blocks {each.blocks})"


def to_config(text: str) -> CoreConfig:
    """Return a core's configuration from its JSON.

    Raises:
        ReplayError: the record has settings that this release does not know.
    """
    values: dict[str, Any] = json.loads(text)
    try:
        values["batching"] = BatchingLimits(**values["batching"])
        values["classes"] = {name: RequestClass(**each) for name, each in values["classes"].items()}
        values["tenant_limits"] = {name: TenantLimits(**each) for name, each in values["tenant_limits"].items()}
        return CoreConfig(**values)
    except (TypeError, KeyError) as error:
        raise ReplayError(f"record: made with settings that this release does not have ({error})") from None


def entries(segments: Iterable[Segment]) -> Iterator[Entry]:
    for segment in segments:
        yield from segment
