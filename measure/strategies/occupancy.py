"""Occupancy per step, from the flight record: which slots computed, and how full the blocks were. Pure.

A slot is a row of the worker. The record contains each plan's added, removed and held-out rows, its chunks and its new
blocks. Every other row with a complete prompt computes one token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from records.rows import Row, Rows
from records.values import AdmissionDigest, Entry, PlanAsked, PlanDigest
from scheduler_svc.core.interface import events as ev


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the worker."""

    computing: tuple[tuple[int, int], ...]
    """Slot and request for each row that computed. Requests are numbered in order of arrival."""
    busy_s: float
    """Time for which the worker was busy with the step."""
    num_blocks: int
    """Blocks held by the requests in slots."""
    num_tokens: int
    """Tokens with KV in these blocks after the step."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Consecutive steps of one request in one slot."""

    slot: int
    request: int
    begin: int
    end: int
    """Index of the first step that follows."""


@dataclass(slots=True, kw_only=True)
class _Row(Row):
    request: int
    num_tokens: int


def read_steps(entries: Iterable[Entry]) -> list[Step]:
    """Return the steps that computed something, in order. The record must be from a service with one worker."""
    numbers: dict[tuple[object, int], int] = {}
    rows: Rows[_Row] = Rows()
    plans: dict[int, Step] = {}
    steps: list[Step] = []
    for entry in entries:
        what = entry.what
        if isinstance(what, ev.RequestArrived):
            numbers.setdefault((what.frontend, what.stream), len(numbers))
        elif isinstance(what, PlanAsked) and what.plan is not None:
            plans[what.plan.step] = _apply(what.plan, rows, numbers)
        elif isinstance(what, ev.StepDone) and (step := plans.pop(what.step, None)) is not None:
            timings = entry.timings
            if step.computing:
                busy = 0 if timings is None else timings.prepare_us + timings.forward_us + timings.sample_us
                steps.append(replace(step, busy_s=busy / 1e6))
    return steps


def _apply(plan: PlanDigest, rows: Rows[_Row], numbers: dict[tuple[object, int], int]) -> Step:
    def admit(new: AdmissionDigest) -> _Row:
        return _Row(
            number=new.row,
            prefill_left=new.num_tokens - new.num_computed_tokens,
            blocks=list(new.blocks),
            request=numbers[new.frontend, new.stream],
            num_tokens=new.num_computed_tokens,
        )

    step = rows.apply(plan, admit)
    computing = [*((row, 1) for row in step.decodes), *step.chunks]
    for row, count in computing:
        row.num_tokens += count
    return Step(
        tuple(sorted((row.number, row.request) for row, _ in computing)),
        0.0,
        sum(len(row.blocks) for row in rows),
        sum(row.num_tokens for row in rows),
    )


def steps_of(steps: Iterable[Step], first: int, count: int) -> list[Step]:
    """Return the steps for the `count` requests from number `first` on, renumbered from 0.

    No other request may run in these steps.
    """
    return [
        replace(step, computing=tuple((slot, request - first) for slot, request in step.computing))
        for step in steps
        if first <= step.computing[0][1] < first + count
    ]


def idle_share(steps: Sequence[Step], slots: int) -> float:
    """Return the share of slots that computed nothing, over all steps."""
    return 1 - sum(len(step.computing) for step in steps) / (slots * len(steps))


def kv_waste(steps: Sequence[Step], block_size: int) -> float:
    """Return the share of space in held blocks that contains no token, over all steps."""
    return 1 - sum(step.num_tokens for step in steps) / (block_size * sum(step.num_blocks for step in steps))


def reserved_waste(steps: Sequence[Step], longest: int) -> float:
    """Return the same share if each request reserved space for the longest sequence."""
    reserved = longest * sum(len(step.computing) for step in steps)
    return 1 - sum(step.num_tokens for step in steps) / reserved


def bars(steps: Sequence[Step]) -> list[Bar]:
    """Return which request used which slot when, ordered by slot."""
    open_bars: dict[int, Bar] = {}
    found: list[Bar] = []
    for index, step in enumerate(steps):
        for slot, request in step.computing:
            bar = open_bars.get(slot)
            if bar is not None and bar.request == request and bar.end == index:
                open_bars[slot] = Bar(slot, request, bar.begin, index + 1)
                continue
            if bar is not None:
                found.append(bar)
            open_bars[slot] = Bar(slot, request, index, index + 1)
    return sorted([*found, *open_bars.values()], key=lambda bar: (bar.slot, bar.begin))


@dataclass(frozen=True, slots=True)
class Padded:
    """A static run with finished rows computed as padding until their batch ends."""

    extra_s: float
    """Time that the padding adds to the run."""
    ends_s: tuple[float, ...]
    """When each batch ends and its responses are sent, in seconds since the start of the run."""
    batch_of: dict[int, int]
    """Batch index of each request."""


def padded(steps: Sequence[Step]) -> Padded:
    """Return the padded form of a static run.

    Every step of a batch takes at least the median time of that batch's full steps. A batch can only shrink, because no
    row computes after its end.
    """
    batches: list[list[Step]] = []
    members: set[int] = set()
    batch_of: dict[int, int] = {}
    for step in steps:
        requests = {request for _, request in step.computing}
        if not batches or not requests & members:
            batches.append([])
            members = set()
        members |= requests
        batch_of |= dict.fromkeys(requests, len(batches) - 1)
        batches[-1].append(step)
    extra, elapsed, ends = 0.0, 0.0, []
    for batch in batches:
        most = max(len(step.computing) for step in batch)
        full = sorted(step.busy_s for step in batch if len(step.computing) == most)
        usual = full[len(full) // 2]
        longer = sum(max(0.0, usual - step.busy_s) for step in batch if len(step.computing) < most)
        extra += longer
        elapsed += longer + sum(step.busy_s for step in batch)
        ends.append(elapsed)
    return Padded(extra, tuple(ends), batch_of)
