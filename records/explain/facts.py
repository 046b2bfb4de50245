"""Known facts of one request's life; the input of `accounting`.

All times are seconds of the core's clock, unless a name says otherwise. A front end states durations only, measured
from its submission of the request, so its clock need not agree with the core's. A worker's clock is translated with the
bounds that each step gives: no step begins before its plan was sent, or ends after its answer came.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.interface.records import Note, Peer, WaitReason


class StreamKey(NamedTuple):
    """Identifier of a request in a record: its front end and the stream there."""

    frontend: Peer
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a worker and what it computed."""

    worker_id: str
    number: int
    planned: float
    """When its plan was made."""
    answered: float
    """When its answer came."""
    started: float | None = None
    """When the worker began with it; None if the worker sent no timings."""
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    copy_s: float = 0.0
    idle_s: float = 0.0
    """How long the device had been idle before it."""
    decodes: frozenset[StreamKey] = frozenset()
    """Requests that got one token without a chunk."""
    chunks: Mapping[StreamKey, int] = field(default_factory=dict)
    """Tokens of the prompts that it computed."""
    swapped_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that it computed."""
        return len(self.decodes) + sum(self.chunks.values())

    @property
    def computing_s(self) -> float:
        """Time for which the worker was busy with it, without block copies."""
        return self.prepare_s + self.forward_s + self.sample_s

    @property
    def busy_s(self) -> float:
        """Time for which the worker was busy with it."""
        return self.computing_s + self.copy_s

    def holds(self, key: StreamKey) -> bool:
        """Return whether the step computed a token of the request."""
        return key in self.decodes or key in self.chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Facts of a call that only the front end knows; durations on its own clock, s."""

    submitted_s: float = 0.0
    """From the call's arrival to the submission."""
    no_scheduler_s: float = 0.0
    """The part of it in which no scheduler served, because one had ended and the next had not started."""
    tokenise_s: float = 0.0
    grammar_s: float = 0.0
    """Validation of the grammar."""
    ended_s: float = 0.0
    """From the submission to the end that the core sent."""
    finished_s: float = 0.0
    """From the submission to the last message that left to the client."""
    detokenise_s: float = 0.0
    """Detokenising after the end."""
    client_s: float = 0.0
    """Waiting for the client to read, after the end."""
    client_before_s: float = 0.0
    """Waiting for the client to read before the end; it delays only messages, unless the credit runs out."""
    stalled_s: float = 0.0
    """Since the call's arrival: the process of the front end did nothing at all."""


class Obstacle(NamedTuple):
    """Limit that held back the requests that competed for a worker, from a time on."""

    time: float
    worker_id: str
    reason: WaitReason | None


class Holding(NamedTuple):
    """A row that another request held while this one waited."""

    key: StreamKey
    tenant: str
    worker_id: str
    since: float
    until: float
    num_tokens: int


class Passing(NamedTuple):
    """Admission of another request while this one waited."""

    key: StreamKey
    time: float
    is_later: bool
    """Whether the other request arrived later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One request from its arrival at the core to its end."""

    key: StreamKey
    request_id: str
    tenant: str = ""
    priority: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that its first attempt found in the prefix cache."""
    num_generated: int = 0
    num_drafted: int = 0
    """Draft tokens that were verified for it."""
    num_accepted: int = 0
    notes: tuple[Note, ...]
    """Its history in order; the first is ARRIVED, the last ENDED unless it is live."""
    steps: tuple[Step, ...] = ()
    """All steps of its workers while it was there, in order of their answers, with those that do not hold it."""
    report: Report | None = None
    until: float | None = None
    """The present, for a live request; None if it has ended."""
    met_drain: bool = False
    """Whether it found no worker because all were drained."""
    is_cut: bool = False
    """Whether the record ends, or has a gap, before its end."""
    end: str = ""
    """The value of its end reason; empty if it is live."""
    policy: str = ""
    """The scheduling policy of its class; empty if unknown."""
    placements: tuple[tuple[float, str], ...] = ()
    """(time, worker) of its admissions, in order."""
    obstacles: tuple[Obstacle, ...] = ()
    """Limits that held back the queues of the workers, in order of time."""
    holdings: tuple[Holding, ...] = ()
    """Rows that others held while it waited."""
    stalls: tuple[tuple[float, float], ...] = ()
    """(begin, end) of the times in which its scheduler did nothing at all."""
    went_first: tuple[Passing, ...] = ()
    """Requests that were admitted while it waited, in order."""
    known_tokens: int = 0
    """Leading prompt tokens that an earlier request had as well, whether they were still cached or not."""
    known_by: StreamKey | None = None
    """That earlier request."""
    names: Mapping[StreamKey, str] = field(default_factory=dict)
    """Request ids of the other requests that are named."""
    usual: "Usual | None" = None

    def name(self, key: StreamKey) -> str:
        """Return the id of a request."""
        return self.request_id if key == self.key else self.names.get(key, f"stream {key.stream}")


class Usual:
    """How long steps usually take: per size class, the median of the fastest worker that has computed enough of them.

    Comparison with other workers finds a worker that is always slow. Comparison with its own other steps finds one that
    is slow for a while.
    """

    MIN_STEPS = 8
    """Steps of a size class from which on a worker's median counts."""

    def __init__(self, steps: Iterable[Step]) -> None:
        samples: dict[tuple[int, int], dict[str, list[float]]] = {}
        for step in steps:
            if step.started is not None and step.num_tokens:
                samples.setdefault(_size(step), {}).setdefault(step.worker_id, []).append(step.computing_s)
        self._medians: dict[tuple[int, int], float] = {}
        for size, workers in samples.items():
            medians = [_median(found) for found in workers.values() if len(found) >= self.MIN_STEPS]
            if medians:
                self._medians[size] = min(medians)

    def step_s(self, step: Step) -> float | None:
        """Return how long such a step usually takes, without block copies; None if too few are known."""
        return self._medians.get(_size(step))

    def alone_s(self, num_decodes: int) -> float | None:
        """Return how long the smallest usual decode step takes that has no more rows; None if too few are known."""
        sizes = [rows for tokens, rows in self._medians if not tokens and 0 < rows <= num_decodes.bit_length()]
        return self._medians[0, min(sizes)] if sizes else None

    def decode_s(self, num_decodes: int) -> float | None:
        """Return how long a step of so many decode rows and no prompt usually takes; None if too few are known."""
        return self._medians.get((0, num_decodes.bit_length()))


def _size(step: Step) -> tuple[int, int]:
    """Return the size class: powers of two of the prompt tokens and of the decode rows."""
    return sum(step.chunks.values()).bit_length(), len(step.decodes).bit_length()


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
