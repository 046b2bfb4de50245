"""One request: its tokens, its limits and where it is in its life.

    WAITING ──admitted──► RUNNING ──last step planned──► ENDING ──answered──► FINISHED
       ▲                     │                              │
       └──preempted, worker lost────────────────────────────┘      (any state ──► FINISHED)

A request that left its worker may still be named by steps in flight; until those are answered it is *unsettled* and is
not admitted again, because its newest tokens are not known yet.
"""

import enum
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.accounts import Account
from scheduler_svc.core.arrays import Int32Array
from scheduler_svc.core.records import Peer, Pooling, RequestArrived
from scheduler_svc.core.swapping import SwappedKV
from shared.frames import TOKEN_BYTES

_STORY_LENGTH = 64


class RequestKey(NamedTuple):
    """A request as its front end names it."""

    frontend: Peer
    stream: int


class RequestState(enum.Enum):
    """See the module's picture."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """A request from arrival to end."""

    key: RequestKey
    request_id: str
    tokens: "array[int]"
    """Prompt and delivered tokens; the newest ones of a running request are still in its row."""
    num_prompt_tokens: int
    limit: int
    """Most tokens, prompt included."""
    stop_token_ids: tuple[int, ...]
    sampling: bytes
    allowed: int
    """Most tokens, prompt included, that the reader's credit allows."""
    deadline: float | None
    traceparent: str
    arrival: float
    sequence: int
    """Order of arrival."""
    highest_token: int = 0
    """Of the tokens it arrived with, negative ones read as unsigned, which makes them larger than any vocabulary; what
    the model adds is checked when it is committed."""
    tenant: str = ""
    request_class: str = ""
    priority: int = 0
    origin: RequestArrived | None = None
    """How it arrived, if a log of it is to be kept."""
    scores: list[tuple[int, bytes]] = field(default_factory=list)
    """Log-probabilities of generated tokens by index, for that log."""
    grammar: bytes = b""
    """What its output conforms to; empty: nothing."""
    grammar_key: bytes = b""
    computes_whole_prompt: bool = False
    """Its prompt is not taken from the prefix cache."""
    pooling: Pooling = Pooling.NONE
    """What becomes of its prompt, if it generates nothing."""
    expected_output_tokens: int = 0
    """The client's hint; 0: none."""
    ttft_deadline: float | None = None
    """When the first token is wanted."""
    total_deadline: float | None = None
    """When the last token is wanted: the client's deadline or its target, whichever comes first."""
    forecast_tokens: float = 0.0
    """Tokens it will probably generate in all, as forecast when it was queued."""
    must_start: float | None = None
    """When it must run at the latest to meet the client's deadline, as forecast when it was queued."""
    latest_start: float | None = None
    """When it must run at the latest to meet these, as forecast when it was queued."""
    state: RequestState = RequestState.WAITING
    queued: bool = False
    """It is in the waiting queue."""
    queued_since: float = 0.0
    queued_tokens: int = 0
    """What it counts for in the queue's token limit; 0 when it does not wait."""
    overtaken: int = 0
    """Admissions that passed it while it did not fit."""
    passed_over: int = 0
    """Admissions that a longest-prefix order preferred to it."""
    left_elsewhere: int = 0
    """Plans that left it to another worker."""
    prefix_waits: int = 0
    """Plans it has waited for a prefix that another request is computing."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that its first attempt found in the prefix cache."""
    salt: bytes = b""
    """Separates the cached prefixes of those who must not probe each other's prompts."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """By block size: the joined keys of its leading full blocks, as far as they were needed."""
    accounted_tokens: int = 0
    """Generated tokens that its account was charged for; while it runs, its row knows."""
    first_planned: float | None = None
    starved_since: float | None = None
    """Since when it has been without credit."""
    attempts: int = 0
    preemptions: int = 0
    preempted_at: int = -1
    """Generated tokens when it was last preempted; it is not paused again before it has more."""
    swapped: SwappedKV | None = None
    """Its KV in a worker's host memory, while it waits after having been swapped out."""
    fatal_steps: int = 0
    """Steps that a worker died of and that it took part in; see `suspicion`."""
    fatal_alone: int = 0
    """Those of them that held nothing else."""
    fatal_at: int = 0
    """Generated tokens at the last of them."""
    suspect: bool = False
    """It runs alone until it is cleared."""
    unsettled: bool = False
    """Steps in flight still name a row that it has left."""
    credit_remainder: int = 0
    story: list[tuple[float, str]] = field(default_factory=list)
    """What happened when; bounded."""

    @property
    def num_generated(self) -> int:
        """Delivered tokens, as far as they are not in a row."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def account(self) -> Account:
        """To whom its service is accounted."""
        return Account(self.request_class, self.tenant)

    @property
    def starts_over(self) -> bool:
        """Whether all of it is computed anew when it goes on elsewhere: a mean that a worker was adding up is lost."""
        return self.pooling is Pooling.MEAN

    def grant(self, credit: int) -> None:
        """The reader has room for `credit` more bytes."""
        tokens, self.credit_remainder = divmod(self.credit_remainder + credit, TOKEN_BYTES)
        self.allowed += tokens
        self.starved_since = None

    def note(self, now: float, what: str) -> None:
        """Adds a line to the request's story."""
        if len(self.story) < _STORY_LENGTH:
            self.story.append((now, what))


def to_request(event: RequestArrived, sequence: int, now: float) -> Request:
    """The `sequence`-th request to arrive."""
    token_ids = event.token_ids
    allowed, remainder = divmod(event.credit, TOKEN_BYTES)
    return Request(
        key=RequestKey(event.frontend, event.stream),
        request_id=event.request_id,
        tokens=to_tokens(token_ids),
        num_prompt_tokens=event.num_prompt_tokens,
        limit=event.num_prompt_tokens + event.max_tokens,
        stop_token_ids=tuple(event.stop_token_ids.tolist()),
        sampling=event.sampling,
        allowed=len(token_ids) + allowed,
        credit_remainder=remainder,
        deadline=event.deadline,
        traceparent=event.traceparent,
        salt=event.salt,
        tenant=event.tenant,
        request_class=event.request_class,
        priority=event.priority,
        computes_whole_prompt=event.computes_whole_prompt or event.pooling is Pooling.MEAN,
        pooling=event.pooling,
        grammar=event.grammar,
        grammar_key=event.grammar_key,
        expected_output_tokens=event.expected_output_tokens,
        ttft_deadline=event.ttft_deadline,
        total_deadline=event.deadline if event.total_deadline is None else _earlier(event),
        arrival=now,
        sequence=sequence,
        highest_token=_highest(token_ids),
        keys={event.block_size: event.block_keys} if event.block_keys else {},
    )


def to_tokens(values: Int32Array) -> "array[int]":
    """A growable copy of a token column."""
    return array("i", values.tobytes())


def as_column(tokens: "array[int]") -> Int32Array:
    """The tokens as `[n] int32`, copied, because the request's log goes on growing."""
    return np.frombuffer(tokens.tobytes(), np.int32)


def _earlier(event: RequestArrived) -> float | None:
    """The client's deadline or its target, whichever comes first."""
    return min((time for time in (event.deadline, event.total_deadline) if time is not None), default=None)


def _highest(tokens: Int32Array) -> int:
    """The largest token, read as an unsigned number; 0 if there is none."""
    unsigned = tokens.view(np.uint32)
    # Takes a third of the time of `max`.
    return int(unsigned[unsigned.argmax()]) if len(unsigned) else 0
