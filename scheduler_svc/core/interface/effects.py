"""Effects: all outputs of the core except plans. The caller executes them in order."""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import Int32Array, spread
from scheduler_svc.core.interface.disk import DiskJob
from scheduler_svc.core.interface.events import ModelFacts
from scheduler_svc.core.interface.records import EndReason as EndReason
from scheduler_svc.core.interface.records import Log, Peer
from scheduler_svc.core.interface.records import RequestEnded as RequestEnded
from shared.request_spec import RequestSpec


@dataclass(slots=True, kw_only=True)
class TokensReady:
    """New tokens for one front end."""

    frontend: Peer
    streams: Int32Array
    """Streams with new tokens, `[n]`."""
    first_indices: Int32Array
    """Index of each stream's first token in this message among its generated tokens, `[n]`."""
    tokens: Int32Array
    """Tokens, grouped by stream in the order of `streams`, `[sum(counts)]`."""
    counts: Int32Array | None = None
    """Number of tokens per stream, `[n]`; None if each stream gets one."""

    def each(self) -> tuple[Int32Array, Int32Array]:
        """Return the stream of each token, and the token's index among the stream's generated tokens."""
        if self.counts is None:
            return self.streams, self.first_indices
        return np.repeat(self.streams, self.counts), spread(self.first_indices, self.counts)


@dataclass(slots=True, kw_only=True)
class ScoresReady:
    """Log-probabilities for one stream's tokens. Those for generated tokens precede the tokens."""

    frontend: Peer
    stream: int
    first_index: int
    """Index of the first token among the generated tokens, or among the prompt tokens."""
    of_prompt: bool
    scores: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAnswered:
    """The retained log of a request that a client wants to continue; None if there is no log."""

    frontend: Peer
    number: int
    log: Log | None


@dataclass(slots=True, kw_only=True)
class LogBegun:
    """A request with an identity has begun; the journal records its tokens and log-probabilities from now on."""

    frontend: Peer
    stream: int
    spec: RequestSpec
    tokens: bytes
    """Column of the prompt and the earlier tokens with which the request arrived."""
    scores: tuple[tuple[int, bytes], ...]
    """Log-probabilities with which the request arrived, as (index among the generated tokens, log-probabilities)."""


@dataclass(slots=True, kw_only=True)
class LogEnded:
    """A request with an identity is no longer live. Emitted after its last tokens.

    Its log is retained unless a `LogDropped` follows immediately.
    """

    frontend: Peer
    stream: int
    identity: bytes
    end: RequestEnded | None
    """The end of a completed request; None if the request can continue."""


@dataclass(slots=True, kw_only=True)
class LogDropped:
    """The log of a request was dropped."""

    identity: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceChanged:
    """The service state that front ends must know has changed."""

    ready: bool
    model: ModelFacts | None
    max_model_len: int
    block_size: int
    max_call_requests: int
    """Maximum number of requests that one call can submit."""
    max_call_tokens: int
    """Maximum number of prompt tokens in all requests of one call, if the call has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendUnknown:
    """An unknown front end sent a message. It must connect and resubmit its requests."""

    frontend: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWelcomed:
    """A worker was accepted and its epoch begins."""

    worker: Peer
    epoch: int
    protocol_version: int
    """Version of the plan protocol in this epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused:
    """A worker was refused; its process must exit."""

    worker: Peer
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUnknown:
    """A worker without a valid epoch sent a message, or was declared lost. It must reconnect."""

    worker: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEmptied:
    """A worker was lost, and its requests wait again."""

    worker_id: str
    reason: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarWanted:
    """Command to a worker: drop some compiled grammars, compile another one and report."""

    worker: Peer
    epoch: int
    key: bytes
    grammar: bytes
    drop: tuple[bytes, ...] = ()
    """Keys of the grammars to drop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskJobWanted:
    """Command to a worker: copy blocks between host memory and disk, and report."""

    worker: Peer
    epoch: int
    job: DiskJob


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPrefilled:
    """A traced request's prompt is computed; the first token of this attempt has arrived."""

    frontend: Peer
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """A traced request has left its worker."""

    frontend: Peer
    stream: int
    outcome: str
    """"finished", "preempted", "moved", "worker lost", "prefix failed" or an end reason."""


Effect = (
    TokensReady
    | ScoresReady
    | RequestEnded
    | ResumeAnswered
    | LogBegun
    | LogEnded
    | LogDropped
    | ServiceChanged
    | FrontendUnknown
    | WorkerWelcomed
    | WorkerRefused
    | WorkerUnknown
    | WorkerEmptied
    | GrammarWanted
    | DiskJobWanted
    | AttemptPrefilled
    | AttemptEnded
)
