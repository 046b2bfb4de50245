"""Facts about one request's life, which are the input of `accounting`.

All times are seconds on the core's clock, unless a name says otherwise. A front end reports only durations, measured
from its submission of the request, so its clock need not agree with the core's. Each step bounds the worker's clock:
no step begins before its plan was sent, or ends after its result arrived.
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
    """One step of a worker, and the tokens that it computed."""

    worker_id: str
    number: int
    planned: float
    """When the core made the plan."""
    answered: float
    """When the core received the result."""
    started: float | None = None
    """When the worker began the step; None if the worker sent no timings."""
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    copy_s: float = 0.0
    """How much longer the step took because of block copies."""
    idle_s: float = 0.0
    """How long the device had been idle before the step."""
    decodes: frozenset[StreamKey] = frozenset()
    """Requests that decoded, and therefore got a token."""
    chunks: Mapping[StreamKey, int] = field(default_factory=dict)
    """Number of prompt tokens computed for each request in prefill."""
    swapped_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computed."""
        return len(self.decodes) + sum(self.chunks.values())

    @property
    def computing_s(self) -> float:
        """Time that the worker spent on the step, without block copies."""
        return self.prepare_s + self.forward_s + self.sample_s

    @property
    def busy_s(self) -> float:
        """Time that the worker spent on the step."""
        return self.computing_s + self.copy_s

    def holds(self, key: StreamKey) -> bool:
        """Return whether the step computed a token of the request."""
        return key in self.decodes or key in self.chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Durations in a call that only the front end can measure, on its own clock, s."""

    submitted_s: float = 0.0
    """From the call's arrival to the submission."""
    no_scheduler_s: float = 0.0
    """The part of `submitted_s` without a running scheduler, between one scheduler's end and the next one's start."""
    tokenise_s: float = 0.0
    grammar_s: float = 0.0
    """Validation of the grammar."""
    ended_s: float = 0.0
    """From the submission to the end that the core sent."""
    finished_s: float = 0.0
    """From the submission until the last message was sent to the client."""
    detokenise_s: float = 0.0
    """Detokenising after the end."""
    client_s: float = 0.0
    """Waiting for the client to read, after the end."""
    client_before_s: float = 0.0
    """Time spent waiting for the client to read, before the end. This delays only messages, unless the credit runs out.
    """
    stalled_s: float = 0.0
    """Time since the call's arrival during which the front-end process was stalled."""


class Obstacle(NamedTuple):
    """Limit that, from a given time on, held back the requests that competed for a worker."""

    time: float
    worker_id: str
    reason: WaitReason | None


class Holding(NamedTuple):
    """A row that another request held while this request waited."""

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
    """Prompt tokens that the first attempt found in the prefix cache."""
    num_restored_tokens: int = 0
    """Number of these tokens that were copied from host memory."""
    num_loaded_tokens: int = 0
    """Number of these tokens that were read from disk before."""
    num_unusable_tokens: int = 0
    """Number of prompt tokens after the cached ones whose KV was cached, but after which it could not begin."""
    lacks_window: bool = False
    """Whether it could not begin there because a window was missing, and not a checkpoint of recurrent state."""
    num_generated: int = 0
    num_drafted: int = 0
    """Draft tokens that were verified for the request."""
    num_accepted: int = 0
    energy_j: float = 0.0
    """Energy of its share of its steps, J; 0 if not known, or while it runs."""
    notes: tuple[Note, ...]
    """The request's history in order; the first note is ARRIVED, the last is ENDED unless the request is live."""
    steps: tuple[Step, ...] = ()
    """All steps of the request's workers during its stay, including steps without it, ordered by result time."""
    report: Report | None = None
    until: float | None = None
    """The current time for a live request; None if it has ended."""
    met_drain: bool = False
    """Whether the request found no worker because all were drained."""
    is_cut: bool = False
    """Whether the record ends, or has a gap, before the request ends."""
    end: str = ""
    """Value of the end reason; empty if the request is live."""
    policy: str = ""
    """The scheduling policy for the request's class; empty if unknown."""
    placements: tuple[tuple[float, str], ...] = ()
    """(time, worker) for each admission of the request, in order."""
    obstacles: tuple[Obstacle, ...] = ()
    """Limits that held back the workers' queues, ordered by time."""
    holdings: tuple[Holding, ...] = ()
    """Rows that other requests held while this request waited."""
    stalls: tuple[tuple[float, float], ...] = ()
    """(begin, end) of the periods during which the scheduler was stalled."""
    went_first: tuple[Passing, ...] = ()
    """Requests that were admitted while this request waited, in order."""
    known_tokens: int = 0
    """Leading prompt tokens that an earlier request also had, whether they were still cached or not."""
    known_by: StreamKey | None = None
    """The earlier request to which `known_tokens` refers."""
    choice: int | None = None
    """Number of the choice, if the call has several."""
    names: Mapping[StreamKey, str] = field(default_factory=dict)
    """Request ids of the other requests that the explanation names."""
    usual: "Usual | None" = None

    def name(self, key: StreamKey) -> str:
        """Return the id of a request."""
        return self.request_id if key == self.key else self.names.get(key, f"stream {key.stream}")


class Usual:
    """Usual step times: per size class, the median on the fastest worker with enough measured steps.

    Comparing a worker with other workers reveals one that is always slow. Comparing a step with the same worker's other
    steps reveals a temporary slowdown.
    """

    MIN_STEPS = 8
    """Minimum number of steps in a size class for a worker's median to count."""

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
        """Return the usual time of the smallest decode step with at most this many rows; None if unknown."""
        sizes = [rows for tokens, rows in self._medians if not tokens and 0 < rows <= num_decodes.bit_length()]
        return self._medians[0, min(sizes)] if sizes else None

    def decode_s(self, num_decodes: int) -> float | None:
        """Return the usual time of a step with this many decode rows and no prompt; None if too few are known."""
        return self._medians.get((0, num_decodes.bit_length()))


def _size(step: Step) -> tuple[int, int]:
    """Return the size class: the prompt tokens and the decode rows, each rounded to a power of two."""
    return sum(step.chunks.values()).bit_length(), len(step.decodes).bit_length()


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
