"""A request's records outside the core: its arrival, its end, its notes, and the log retained from arrival to end."""

import enum
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.interface.arrays import Int32Array
from shared.request_spec import RequestSpec

Peer = bytes
"""ZeroMQ routing id for one incarnation of a front end or worker."""


@dataclass(frozen=True, slots=True)
class GrammarFailure:
    """The reason why a worker cannot compile a grammar."""

    reason: str
    is_invalid: bool
    """Whether the grammar itself is invalid, so that other workers would fail too."""


@dataclass(slots=True, kw_only=True)
class RequestArrived:
    """A front end submits a request, or resubmits it to a new core."""

    frontend: Peer
    stream: int
    spec: RequestSpec
    token_ids: Int32Array
    """The prompt, followed by the tokens that were already delivered, `[n]`."""
    credit: int
    """Buffer space for the client's output, bytes."""
    deadline: float | None = None
    """Core time by which the request must be complete, s; None for no deadline."""
    ttft_deadline: float | None = None
    """Core time by which the first token is wanted, s."""
    total_deadline: float | None = None
    """When the last token is due, in core time, s. Unlike `deadline`, missing this time does not end the request."""
    block_keys: bytes = b""
    """Joined keys of the leading full blocks of `block_size` tokens; empty if the front end has not computed them."""
    block_size: int = 0
    again: bool = False
    """Whether the core may already have the request. If so, this submission takes the request over."""
    accepted: bool = False
    """Whether an earlier core accepted the request. If so, queue limits and forecasts do not refuse it."""


class EndReason(enum.Enum):
    """Reason why a request ended. The names match EndReason in the link protocol."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUEUE_FULL = "queue_full"
    TENANT_LIMIT = "tenant_limit"
    INVALID = "invalid"
    NO_WORKER = "no_worker"
    ROW_FAILED = "row_failed"
    POISON = "poison"
    STALLED = "stalled"
    SHUTDOWN = "shutdown"
    DUPLICATE = "duplicate"
    EMBEDDED = "embedded"


@dataclass(slots=True, kw_only=True)
class RequestEnded:
    """A request has ended. Emitted exactly once per request, after its last tokens."""

    frontend: Peer
    stream: int
    request_id: str
    reason: EndReason
    message: str = ""
    retry_ms: int = 0
    completion_tokens: int = 0
    stop_token_id: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_draft_tokens: int = 0
    energy_j: float = 0.0
    """Energy that its share of its steps used, J; 0 if not known."""
    queued_s: float = 0.0
    embedding: bytes = b""
    """For EMBEDDED, a float32 column `[hidden_size]`."""
    field: str = ""
    """For INVALID, the wrong field's name in generation.proto; empty for the input."""


class WaitReason(enum.Enum):
    """Reason why a request waits; a member's value completes the sentence "it waits for"."""

    TURN = "its turn"
    """Other requests rank before this one, or no plan was made since it began to wait."""
    MEMORY = "memory"
    ROWS = "a free row"
    TENANT_LIMIT = "its tenant's limit of running requests"
    TENANT_RATE = "its tenant's token rate"
    SESSION = "memory for the working set of a new session"
    GRAMMAR = "the compilation of its grammar"
    PREFIX = "a prefix that another request computes"
    CREDIT = "its reader, which takes no more output"
    BATCH = "a batch to open"
    ANSWER = "the answer to its last step"
    ELSEWHERE = "the next plan of another worker"
    ALONE = "a step of its own"
    """Workers died while they computed the request, so it must run alone until it is cleared."""
    NO_WORKER = "a worker that can serve it"
    BUDGET = "room in a step that other prompts fill"
    COPY = "its prefix, which is copied from host memory"
    DISK = "its prefix, which is read from disk"
    BOUNDARY = "the end of a prefix that another request computes"
    """With recurrent state or windows, a request shares a prefix only up to a boundary."""

    # Each enum member is a single object, so compare identities. `Enum` hashes the member's name, which takes five
    # times as long.
    __hash__ = object.__hash__


RESTORED_TOKENS = "tokens copied from host memory"
LOADED_TOKENS = "tokens read from disk"
NO_CHECKPOINT = "cached tokens not usable without a checkpoint of the state after them"
NO_TAIL = "cached tokens not usable without the window at their end"
"""Ends of parts of the text of an ADMITTED note, after a number of tokens, if there are any."""


class NoteKind(enum.Enum):
    """Kind of a note in a request's history."""

    ARRIVED = "arrived"
    FORECAST = "forecast"
    """Forecast for it at its arrival."""
    SESSION = "session"
    """It continues a session."""
    WAITS = "waits"
    """The request waits for a new reason. The text is a `WaitReason`."""
    ADMITTED = "admitted"
    FIRST_TOKEN = "first token"
    HELD = "held out"
    """Its row is paused. The text is the `WaitReason`. The pause ends with its next step."""
    PREEMPTED = "preempted"
    """It has left its row. Its KV will be recomputed."""
    SWAPPED = "swapped"
    """It has left its row. Its KV is in the worker's host memory."""
    MOVED = "moved"
    LOST = "worker lost"
    PREFIX_FAILED = "prefix failed"
    FAULT = "fault"
    ENDED = "ended"
    SCHEDULER_LOST = "scheduler lost"
    """The scheduler exited, and the next scheduler took the request over. Only readers of records make this note."""
    SUBMITTED_AGAIN = "submitted again"
    """The front end lost the scheduler and resubmitted the request. Only readers of records make this note."""
    SILENT = "worker silent"
    """The worker was lost, and the same process reconnected. Only readers of records make this note."""
    UNRECORDED = "not recorded"
    """The record lacks entries from here on. Only readers of records make this note."""

    __hash__ = object.__hash__


@dataclass(slots=True, kw_only=True)
class Note:
    """One line of a request's history."""

    frontend: Peer
    stream: int
    time: float
    """Core time, s."""
    kind: NoteKind
    text: str
    """The line for operators. For WAITS and HELD, the value of a `WaitReason`."""
    by: tuple[Peer, int] | None = None
    """For PREEMPTED and SWAPPED, (front end, stream) of the request that needed the memory or row."""

    @property
    def line(self) -> str:
        """The note as a line of the history."""
        match self.kind:
            case NoteKind.WAITS:
                return f"waits for {self.text}"
            case NoteKind.HELD:
                return f"held out of steps: waits for {self.text}"
            case _:
                return self.text


@dataclass(slots=True, kw_only=True)
class QueueNote:
    """Reason why a plan admits none of the requests that still compete for the worker.

    A note applies to all these requests until the next note for the same worker. The cost of planning therefore does
    not depend on the queue length.
    """

    worker: Peer
    time: float
    """Core time, s."""
    reason: WaitReason | None
    """None if no obstacle exists, or no request is left."""


class LateText(Protocol):
    """A value whose text is only made when somebody reads it, because most lines are never read."""

    @property
    def text(self) -> str:
        """The text."""


Line = tuple[float, NoteKind, str | LateText, tuple[Peer, int] | None]
"""Time, kind and text of a note, and the request that caused it: (front end, stream). A plain tuple, because most lines
are never read.
"""
RequestLine = tuple[tuple[Peer, int], Line]
"""(front end, stream) of a request, and a line of its history."""
Notes = list[RequestLine | QueueNote]


def to_note(key: tuple[Peer, int], line: Line) -> Note:
    """Return a line of the history of the request with this key."""
    time, kind, text, by = line
    frontend, stream = key
    return Note(
        frontend=frontend,
        stream=stream,
        time=time,
        kind=kind,
        text=text if isinstance(text, str) else text.text,
        by=by,
    )


_OVERHEAD = 512
"""Approximate memory of a log without its tokens, bytes."""


@dataclass(frozen=True, slots=True)
class Log:
    """Retained log of one request."""

    spec: RequestSpec
    tokens: bytes
    """Column of prompt and generated tokens, int32."""
    scores: tuple[tuple[int, bytes], ...]
    """(index among the generated tokens, log-probabilities), if the client requested them."""
    end: RequestEnded | None
    """The end of a completed request; None if the request can continue."""
    charged_tokens: int = 0
    """Number of tokens deducted from the tenant's bucket; 0 if unknown."""

    @property
    def size(self) -> int:
        """Approximate memory of the log, bytes."""
        scores = sum(len(scores) + 16 for _, scores in self.scores)
        spec = self.spec
        opaque = len(spec.sampling) + len(spec.grammar) + len(spec.resume_info)
        return _OVERHEAD + len(self.tokens) + scores + opaque
