"""Everything the core asks the outside to do. Effects are carried out in order."""

from dataclasses import dataclass

from scheduler_svc.core.arrays import Int32Array
from scheduler_svc.core.events import ModelFacts
from scheduler_svc.core.records import EndReason as EndReason
from scheduler_svc.core.records import Log, Peer, RequestArrived
from scheduler_svc.core.records import RequestEnded as RequestEnded


@dataclass(slots=True, kw_only=True)
class TokensReady:
    """New tokens of one front end's streams, one per stream."""

    frontend: Peer
    streams: Int32Array
    first_indices: Int32Array
    """Index of the token within the generated tokens of its stream."""
    tokens: Int32Array


@dataclass(slots=True, kw_only=True)
class ScoresReady:
    """Log-probabilities of one stream's tokens; emitted before the tokens, if these are generated ones."""

    frontend: Peer
    stream: int
    first_index: int
    """Among the generated tokens, or the prompt's."""
    of_prompt: bool
    scores: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAnswered:
    """What is kept of a request that a client wants to go on with; None: nothing."""

    frontend: Peer
    number: int
    log: Log | None


@dataclass(slots=True, kw_only=True)
class LogBegun:
    """A request with an identity is live: from now on its tokens and log-probabilities are worth keeping."""

    request: RequestArrived
    """With the tokens that it has by now."""
    scores: tuple[tuple[int, bytes], ...]
    """(index among the generated tokens, log-probabilities) of those that it came with."""


@dataclass(slots=True, kw_only=True)
class LogEnded:
    """A request with an identity is live no longer; emitted after its last tokens. Its log is kept, unless it
    is dropped at once."""

    frontend: Peer
    stream: int
    identity: bytes
    end: RequestEnded | None
    """How it ended, if it ended well; otherwise it can go on."""


@dataclass(slots=True, kw_only=True)
class LogDropped:
    """Nothing is known any longer of the request with this identity."""

    identity: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceChanged:
    """What front ends must know has changed."""

    ready: bool
    model: ModelFacts | None
    max_model_len: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendUnknown:
    """A front end that the core does not know sent something: it must say hello and submit again."""

    frontend: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWelcomed:
    """A worker's epoch begins."""

    worker: Peer
    epoch: int
    protocol_version: int
    """What is spoken in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRefused:
    """A worker cannot serve here; it exits."""

    worker: Peer
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUnknown:
    """A worker without a valid epoch sent something, or was given up: it must say hello again."""

    worker: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEmptied:
    """A worker was lost; its requests wait again."""

    worker_id: str
    reason: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarWanted:
    """A worker is to compile a grammar and to report."""

    worker: Peer
    epoch: int
    key: bytes
    grammar: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPrefilled:
    """A traced request's prompt is computed; its first token of this attempt is there."""

    frontend: Peer
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """A traced request left its worker."""

    frontend: Peer
    stream: int
    outcome: str
    """"finished", "preempted", "worker lost" or an end reason."""


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
    | AttemptPrefilled
    | AttemptEnded
)
