"""Metrics of a run from the server's flight record: its steps, and the device idle share.

The workers' timings in a record show when each step began on the device and how long it took. The idle fraction
therefore covers only the run, not the idle time before it. The record must be on this machine.
"""

from dataclasses import dataclass, field
from pathlib import Path

from records.reader import read
from records.values import Entry, PlanAsked
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import Peer, RequestEnded

FLUSH_S = 1.5
"""Time after which the recorder has written an event, in seconds."""
_US = 1e6


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Metrics for the time between two timestamps. A value is None if nothing of its kind happened."""

    steps: int
    rows_per_step: float | None
    """Mean number of sequences in a step."""
    device_idle_share: float | None
    """Share of time in which the devices computed no step, averaged over the workers."""
    preemptions: int
    """Preemptions of requests that ended."""
    prefix_hit_share: float | None
    """Share of prompt tokens found in the prefix cache, over requests that ended."""


@dataclass(slots=True)
class _Window:
    begin: float
    end: float
    rows: dict[tuple[Peer, int], int] = field(default_factory=dict)
    """Sequences of the plans in flight, by worker and step."""
    joined: dict[Peer, float] = field(default_factory=dict)
    """Time since which each connected worker counts."""
    prompts: dict[tuple[Peer, int], int] = field(default_factory=dict)
    """Prompt tokens of the live requests."""
    connected_s: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    sum_rows: int = 0
    preemptions: int = 0
    cached: int = 0
    asked: int = 0

    def overlap(self, begin: float, end: float) -> float:
        return max(0.0, min(end, self.end) - max(begin, self.begin))

    def take(self, at: float, entry: Entry) -> None:
        match entry.what:
            case ev.RequestArrived() as arrived:
                self.prompts[arrived.frontend, arrived.stream] = arrived.spec.num_prompt_tokens
            case PlanAsked(plan=plan) if plan is not None:
                self.rows[plan.worker, plan.step] = plan.num_decodes + len(plan.chunk_rows)
            case ev.StepDone() as done:
                self._step(at, self.rows.pop((done.worker, done.step), 0), entry)
            case RequestEnded() as end:
                self._ended(at, self.prompts.pop((end.frontend, end.stream), 0), end)
            case ev.WorkerHello() as hello:
                self.joined.setdefault(hello.worker, at)
            case ev.WorkerLost() as lost:
                self.connected_s += self.overlap(self.joined.pop(lost.worker, at), at)

    def _step(self, at: float, num_rows: int, entry: Entry) -> None:
        timings = entry.timings
        if timings is not None:
            started = timings.started_unix_us / _US
            self.busy_s += self.overlap(started, started + (timings.forward_us + timings.sample_us) / _US)
        if num_rows and self.begin <= at <= self.end:
            self.steps += 1
            self.sum_rows += num_rows

    def _ended(self, at: float, num_prompt: int, end: RequestEnded) -> None:
        if self.begin <= at <= self.end:
            self.preemptions += end.preemptions
            self.cached += end.cached_prompt_tokens
            self.asked += num_prompt

    def figures(self) -> RecordedRun:
        connected = self.connected_s + sum(self.overlap(since, self.end) for since in self.joined.values())
        return RecordedRun(
            steps=self.steps,
            rows_per_step=self.sum_rows / self.steps if self.steps else None,
            device_idle_share=max(0.0, 1 - self.busy_s / connected) if connected else None,
            preemptions=self.preemptions,
            prefix_hit_share=self.cached / self.asked if self.asked else None,
        )


def run_in_record(place: Path, begin_unix_s: float, end_unix_s: float) -> RecordedRun:
    """Return the metrics of a run.

    Args:
        place: folder of the record.
        begin_unix_s: beginning of the run, seconds since 1970.
        end_unix_s: end of the run.

    Raises:
        OSError: a file cannot be read.
        UnreadableRecordError: a file is not a record, or of a newer version.
    """
    window = _Window(begin_unix_s, end_unix_s)
    for segment in read(place):
        opening = segment.opening
        shift = opening.unix_ns / 1e9 - opening.core_time
        for state in opening.workers:
            window.joined.setdefault(state.hello.worker, opening.core_time + shift)
        for event, _ in opening.live:
            window.prompts.setdefault((event.frontend, event.stream), event.spec.num_prompt_tokens)
        for entry in segment:
            window.take(entry.time + shift, entry)
    return window.figures()
