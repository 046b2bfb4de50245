"""What is known of one request outside the core: how it arrived, how it ended, and the log that is kept in between.

Events bring these in and effects carry them out, so they lie below both modules, which name theirs again.
"""

import enum
from dataclasses import dataclass

from scheduler_svc.core.arrays import Int32Array

Peer = bytes
"""ZeroMQ routing id of one incarnation of a front end or worker."""


class Pooling(enum.IntEnum):
    """What becomes of a prompt; the numbers are those of plan.proto."""

    NONE = 0
    """It is continued."""
    LAST = 1
    """The last hidden state of its last token is its embedding."""
    MEAN = 2
    """The mean of those of all its tokens is."""


@dataclass(slots=True, kw_only=True)
class RequestArrived:
    """A front end submits a request (or submits it again to a new core)."""

    frontend: Peer
    stream: int
    request_id: str
    token_ids: Int32Array
    """The prompt, then whatever was delivered before."""
    num_prompt_tokens: int
    max_tokens: int
    """Most tokens to generate in all, at least 1."""
    stop_token_ids: Int32Array
    sampling: bytes
    """Serialized sampling parameters, passed to the worker unread."""
    credit: int
    """Bytes of output the reader has room for."""
    deadline: float | None
    """Core time."""
    traceparent: str
    salt: bytes = b""
    """Requests share cached prefixes only with those of the same salt."""
    block_keys: bytes = b""
    """Joined keys of the leading full blocks, if the front end has computed them, for blocks of `block_size` tokens."""
    block_size: int = 0
    tenant: str = ""
    request_class: str = ""
    priority: int = 0
    identity: bytes = b""
    """Says which request this is, whichever front end has it; empty: nothing is kept of it."""
    resume_info: bytes = b""
    """What a front end needs to go on with it."""
    again: bool = False
    """It may be known already, and is then taken over."""
    grammar: bytes = b""
    """Serialized, passed to the worker unread; empty: none."""
    grammar_key: bytes = b""
    computes_whole_prompt: bool = False
    """Its prompt is not taken from the prefix cache."""
    pooling: Pooling = Pooling.NONE
    """With another one it generates nothing; `max_tokens` is then 1."""
    expected_output_tokens: int = 0
    """0: no hint."""
    ttft_deadline: float | None = None
    """Core time by which the first token is wanted."""
    total_deadline: float | None = None
    """Core time by which the last token is wanted; unlike `deadline`, missing it does not end the request."""


class EndReason(enum.Enum):
    """Why a request ended; the names are those of the link protocol's EndReason."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUEUE_FULL = "queue_full"
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
    """A request ended; emitted exactly once per request, after its last tokens."""

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
    queued_s: float = 0.0
    embedding: bytes = b""
    """For EMBEDDED: a float32 column."""


_OVERHEAD = 512
"""What a log costs beside its tokens, bytes, roughly."""


@dataclass(frozen=True, slots=True)
class Log:
    """What is kept of one request."""

    request: RequestArrived
    """As it arrived; its own tokens may be fewer."""
    tokens: bytes
    """Column of prompt and generated tokens."""
    scores: tuple[tuple[int, bytes], ...]
    """(index among the generated tokens, log-probabilities), if they were asked for."""
    end: RequestEnded | None
    """How it ended, if it ended well; otherwise it can go on."""

    @property
    def size(self) -> int:
        """Bytes."""
        scores = sum(len(scores) + 16 for _, scores in self.scores)
        request = self.request
        opaque = len(request.sampling) + len(request.grammar) + len(request.resume_info) + len(request.block_keys)
        return _OVERHEAD + 2 * len(self.tokens) + scores + opaque
