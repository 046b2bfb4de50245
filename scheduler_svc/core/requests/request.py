"""One request: its tokens, its limits and its state; see `lifecycle.states` for the transitions.

Steps in flight may still refer to a request that has left its worker. Until their results arrive, the request is
*unsettled*. It is not readmitted in this state, because its newest tokens are unknown.
"""

import enum
import hashlib
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.arrays import Int32Array
from scheduler_svc.core.interface.records import LateText, Line, NoteKind, Notes, Peer, RequestArrived, WaitReason
from scheduler_svc.core.memory.swapping import SwappedKV
from scheduler_svc.core.requests.accounts import Account
from scheduler_svc.core.requests.prediction import Prediction
from shared.frames import TOKEN_BYTES
from shared.request_spec import Pooling, RequestSpec

_STORY_LENGTH = 64
_MAX_REASONS = 16
"""Maximum number of noted reasons per wait. Without it, two workers with alternating reasons would add one per plan."""


class RequestKey(NamedTuple):
    """Identifier of a request: its front end and the stream there."""

    frontend: Peer
    stream: int


class RequestState(enum.Enum):
    """A request's state; only `lifecycle.states` changes it."""

    ARRIVED = "has not been accepted yet"
    QUEUED = "waits in the backlog"
    STARVED = "waits until its stream has credit"
    STRANDED = "waits for a worker that can serve it"
    RUNNING = "occupies a row of a worker"
    ENDING = "waits for the result of its last step"
    FINISHED = "has ended"

    # Each enum member is a single object, so compare identities. `Enum` hashes the member's name, which takes five
    # times as long.
    __hash__ = object.__hash__


@dataclass(slots=True, eq=False)
class Wait:
    """One wait for a worker; a new wait begins whenever the request is queued again."""

    since: float = 0.0
    released: float = 0.0
    """When its tenant's quota last let it compete; 0 if it was not held for the quota."""
    tokens: int = 0
    """Tokens that count towards the queue's token limit for this request; 0 once it has a row."""
    uncached: int = 0
    """Tokens that no worker had cached when the wait began."""
    forecast_tokens: float = 0.0
    """Forecast of the total output tokens."""
    must_start: float | None = None
    """Latest start that meets the client's deadline, by forecast."""
    latest_start: float | None = None
    """Latest start that meets the request's deadlines and targets, by forecast; None without any, or once missed."""
    behind: "Request | None" = None
    """The more urgent request for which this request was preempted, and which it must not overtake."""
    overtaken: float = 0.0
    """Number of admissions that overtook the request while it did not fit."""
    passed_over: int = 0
    """Number of admissions that a longest-prefix order preferred to the request."""
    num_assigned: int = 0
    """Number of times that it was assigned to a worker whose next plan did not admit it."""
    reason: WaitReason = WaitReason.TURN
    """What it waits for, according to the last decision."""
    num_reasons: int = 0
    """Number of noted changes of the reason."""


@dataclass(slots=True, eq=False)
class Faults:
    """Faults that involved a request; see `quarantine` and `row_failures`."""

    fatal_steps: int = 0
    """Number of steps containing this request during which a worker died."""
    fatal_alone: int = 0
    """Number of fatal steps that contained no other request."""
    fatal_at: int = 0
    """Generated tokens at the last fatal step."""
    suspect: bool = False
    """Whether the request must run alone until it is cleared."""
    lost_prefixes: int = 0
    """Number of times that shared KV from other requests was found to be invalid."""


@dataclass(slots=True, eq=False)
class Request:
    """A request from arrival to end; times in seconds on the core's clock."""

    key: RequestKey
    spec: RequestSpec
    tokens: "array[int]"
    """Prompt and delivered tokens; the newest tokens of a running request are still in its row."""
    limit: int
    """Maximum number of tokens, prompt included."""
    stop_token_ids: tuple[int, ...]
    allowed: int
    """Maximum number of tokens, prompt included, that the reader's credit allows."""
    deadline: float | None
    arrival: float
    sequence: int
    """Position in the order of arrival."""
    highest_token: int = 0
    """Largest token id that it arrived with.

    Negative ids are read as large unsigned numbers, which exceed any vocabulary. Generated tokens are checked when they
    are committed.
    """
    accepted: bool = False
    """Whether this core or an earlier core had accepted the request before its current arrival."""
    is_logged: bool = False
    """Whether a log is kept for it, because it has an identity and was accepted."""
    scores: list[tuple[int, bytes]] = field(default_factory=list)
    """(index, log-probabilities) for generated tokens, for that log."""
    grammar_key: bytes = b""
    """SHA-256 of its grammar; empty without one."""
    computes_whole_prompt: bool = False
    """Whether its prompt must not be taken from the prefix cache."""
    ttft_deadline: float | None = None
    """Time by which the first token is wanted."""
    total_deadline: float | None = None
    """When the last token is due: the client's deadline or its target, whichever comes first."""
    late_rank: float | None = None
    """Its key under `edf` after it missed its target; None before that."""
    state: RequestState = RequestState.ARRIVED
    wait: Wait = field(default_factory=Wait)
    """Its present wait, or the last one."""
    faults: Faults = field(default_factory=Faults)
    session: int = -1
    """Its slot in the table of sessions; -1 if it has none."""
    repeated_tokens: int = 0
    """Leading tokens that it shares with the turn of its session before."""
    prefix_waits: int = 0
    """Number of times that it began to wait for a prefix block computed by another request."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that its first attempt found in the prefix cache."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """By block size, the joined keys of its leading full blocks, computed on demand."""
    prediction: Prediction | None = None
    """Times forecast on arrival; None if nothing was measured, or an earlier core accepted the request."""
    prompt_charged: bool = False
    """Whether this core or an earlier one has charged its tenant for its prompt."""
    reserved_output: int | None = None
    """Output tokens reserved from its tenant's rate, including earlier ones; None before it starts."""
    first_planned: float | None = None
    starved_since: float | None = None
    """Time since which it has no credit."""
    stranded_since: float = 0.0
    """Time since which no worker in the fleet serves it."""
    home: int = 0
    """Epoch of the worker that ran it last; 0 if it has not run."""
    attempts: int = 0
    preemptions: int = 0
    preempted_at: int = -1
    """Number of generated tokens when it was last preempted; it is not preempted again before it has more."""
    drafted_tokens: int = 0
    """Draft tokens verified for it in earlier attempts and steps."""
    accepted_tokens: int = 0
    """Number of `drafted_tokens` that were accepted."""
    energy_j: float = 0.0
    """Energy charged to it in earlier attempts and steps, J; 0 if no worker measures energy."""
    swapped: SwappedKV | None = None
    """Its KV in a worker's host memory, while it waits after a swap-out."""
    restored_tokens: int = 0
    """Tokens of cached blocks that were copied from host memory for it since it began to wait."""
    loaded_tokens: int = 0
    """Tokens of blocks that were read from disk to host memory for it since it began to wait."""
    num_loads: int = 0
    """Number of times that it has waited for blocks on disk."""
    unsettled: bool = False
    """Whether steps in flight still refer to a row that it has left."""
    credit_remainder: int = 0
    story: list[Line] = field(default_factory=list)
    """Its history; bounded."""
    notes: Notes | None = None
    """Receives the notes of all requests for a recorder, without a bound; None without readers."""

    @property
    def num_generated(self) -> int:
        """Number of delivered tokens that are not only in a row."""
        return len(self.tokens) - self.spec.num_prompt_tokens

    def first_token_due(self, constant_s: float, token_s: float) -> float:
        """Return the time by which the first token is wanted: the request's own target, or else the given one.

        Args:
            constant_s: target for every prompt, in seconds.
            token_s: time added per prompt token, in seconds.
        """
        if self.ttft_deadline is not None:
            return self.ttft_deadline
        return self.arrival + constant_s + token_s * self.spec.num_prompt_tokens

    @property
    def under_way(self) -> bool:
        """Whether its acceptance is final.

        After that, the request ends only by completion, its client, its deadline, lack of suitable workers, or its own
        fault.
        """
        return self.accepted or self.attempts > 0 or self.num_generated > 0

    @property
    def is_returning(self) -> bool:
        """Whether an earlier scheduler ran it, and this one has not yet."""
        return self.accepted and self.num_generated > 0 and not self.home

    @property
    def account(self) -> Account:
        """The account that its service is charged to."""
        return Account(self.spec.request_class, self.spec.tenant)

    @property
    def starts_over(self) -> bool:
        """Whether it must be recomputed from the start when it continues on another worker.

        This is the case for mean pooling, because the running mean of the hidden states is lost.
        """
        return self.spec.pooling == Pooling.MEAN

    def grant(self, credit: int) -> None:
        """Add `credit` bytes of buffer space at the reader."""
        tokens, self.credit_remainder = divmod(self.credit_remainder + credit, TOKEN_BYTES)
        self.allowed += tokens
        self.starved_since = None

    def note(self, now: float, kind: NoteKind, text: str | LateText, *, by: "RequestKey | None" = None) -> None:
        """Add a line to the request's history."""
        line = now, kind, text, by
        if len(self.story) < _STORY_LENGTH:
            self.story.append(line)
        if self.notes is not None:
            self.notes.append((self.key, line))

    def waits_for(self, reason: WaitReason, now: float) -> None:
        """Record the reason why the request waits. A note is added only when the reason changes."""
        wait = self.wait
        if wait.reason is not reason and wait.num_reasons < _MAX_REASONS:
            wait.reason = reason
            wait.num_reasons += 1
            self.note(now, NoteKind.WAITS, reason.value)


def to_request(event: RequestArrived, sequence: int, now: float, notes: Notes | None = None) -> Request:
    """Create a request from an arrival, with arrival number `sequence`; append its notes to `notes`."""
    spec, token_ids = event.spec, event.token_ids
    num_tokens, num_prompt = len(token_ids), spec.num_prompt_tokens
    assert 0 < num_prompt <= num_tokens, "the front ends' codec refuses such a submission"
    allowed, remainder = divmod(event.credit, TOKEN_BYTES)
    return Request(
        key=RequestKey(event.frontend, event.stream),
        spec=spec,
        tokens=to_tokens(token_ids),
        limit=num_prompt + spec.max_tokens,
        stop_token_ids=tuple(array("i", spec.stop_token_ids)),
        allowed=num_tokens + allowed,
        credit_remainder=remainder,
        deadline=event.deadline,
        computes_whole_prompt=spec.computes_whole_prompt or spec.pooling == Pooling.MEAN,
        grammar_key=hashlib.sha256(spec.grammar).digest() if spec.grammar else b"",
        ttft_deadline=event.ttft_deadline,
        total_deadline=event.deadline if event.total_deadline is None else _earlier(event),
        accepted=event.accepted,
        prompt_charged=num_tokens > num_prompt,
        arrival=now,
        sequence=sequence,
        highest_token=_highest(token_ids),
        keys={event.block_size: event.block_keys} if event.block_keys else {},
        notes=notes,
    )


def to_tokens(values: Int32Array) -> "array[int]":
    """Return a growable copy of a token column."""
    return array("i", values.tobytes())


def as_column(tokens: "array[int]") -> Int32Array:
    """Return a copy of the tokens as `[n] int32`; a copy, because the request's tokens grow."""
    return np.frombuffer(tokens.tobytes(), np.int32)


def _earlier(event: RequestArrived) -> float | None:
    """Return the client's deadline or its target, whichever comes first; None without both."""
    return min((time for time in (event.deadline, event.total_deadline) if time is not None), default=None)


def _highest(tokens: Int32Array) -> int:
    """Return the largest token id, read as an unsigned number; 0 if there is none."""
    unsigned = tokens.view(np.uint32)
    # This comparison takes a third of the time of `max`.
    return int(unsigned[unsigned.argmax()]) if len(unsigned) else 0
