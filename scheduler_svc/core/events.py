"""Everything that can happen to the scheduler core.

Events carry values only; whoever builds them has already checked their shape (columns of equal length, ids that fit
their type), not their meaning: a stale epoch, an unknown stream or a surprising row is the core's to judge.

Nobody changes an event, an effect or a plan. Those that are made for every step or request are not frozen all the same:
a frozen dataclass takes three times as long to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.arrays import Int32Array
from scheduler_svc.core.records import Log
from scheduler_svc.core.records import Peer as Peer
from scheduler_svc.core.records import Pooling as Pooling
from scheduler_svc.core.records import RequestArrived as RequestArrived


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendJoined:
    """A front end said hello."""

    frontend: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLost:
    """A front end said goodbye, its lease ran out, or its connection is gone; nobody reads its streams any more."""

    frontend: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The client of a stream has gone."""

    frontend: Peer
    stream: int
    keep: bool = False
    """It may come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAsked:
    """A client wants to go on with a request; if it is live somewhere, it ends there."""

    frontend: Peer
    number: int
    identity: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsDropped:
    """Somebody ends requests, and nothing is to be kept of them."""

    identities: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsRestored:
    """What an earlier core knew of requests whose clients may come back. Comes first, if at all."""

    logs: tuple[tuple[float, Log], ...]
    """Age in seconds and log, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatched:
    """The front end found a stop string; generated tokens after the first `keep_tokens` do not count."""

    frontend: Peer
    stream: int
    keep_tokens: int


@dataclass(slots=True, kw_only=True)
class CreditGranted:
    """A reader took `credit` bytes."""

    frontend: Peer
    stream: int
    credit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a worker says of its model."""

    name: str
    architecture: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0
    """Elements of an embedding; 0: it makes none."""
    break_even_context: int = 0
    """The context at which a token's attention costs as much as its products with the weights; 0: it does not grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """A worker presents itself (again)."""

    worker: Peer
    worker_id: str
    model: ModelFacts
    block_size: int
    num_blocks: int
    max_rows: int
    max_tokens_per_step: int
    num_host_blocks: int = 0
    protocol_version: int = 0
    """The version of the plan protocol that is spoken with it."""
    device: str = ""
    """What it computes on; with `pid` for operators alone."""
    pid: int = 0
    """Its process id, where it runs."""
    process: str = ""
    """What the machine calls its process; nothing that the core looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker's connection is gone, it said goodbye, or what it sent makes no sense."""

    worker: Peer
    reason: str
    orderly: bool = False
    """It said goodbye: nothing that it ran is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCompiling:
    """A worker compiles and will be silent for up to `expected_s`."""

    worker: Peer
    epoch: int
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A row that failed alone."""

    row: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarReported:
    """A worker has compiled a grammar, or cannot."""

    worker: Peer
    epoch: int
    key: bytes
    failure: str = ""
    """Why it cannot; empty: it has."""


@dataclass(slots=True, kw_only=True)
class RowScores:
    """Log-probabilities of a row's tokens, passed to its front end unread."""

    row: int
    generation: int
    prompt_index: int
    """0: of the token sampled in this step; otherwise the index of the first of them in the prompt."""
    scores: bytes


@dataclass(slots=True, kw_only=True)
class RowEmbedding:
    """The embedding of a row that pools, passed to its front end unread."""

    row: int
    generation: int
    values: bytes


@dataclass(slots=True, kw_only=True)
class StepDone:
    """A worker answered a plan."""

    worker: Peer
    epoch: int
    step: int
    rows: Int32Array
    """Rows that sampled, ascending."""
    tokens: Int32Array
    """One token per row."""
    failures: Sequence[FailedRow] = ()
    scores: Sequence[RowScores] = ()
    embeddings: Sequence[RowEmbedding] = ()
    """Of the rows that pool and whose last chunk this step had."""
    completed_copies: Sequence[int] = ()
    """Ids of the block copies that are done."""
    copied_blocks: int = 0
    copy_s: float = 0.0
    """How long copying them took."""
    idle_s: float = 0.0
    """How long the device had nothing to do before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """An operator wants a worker to become idle: nothing new starts there."""

    worker_id: str
    move: bool
    """Whether its running requests go on elsewhere, if there is an elsewhere; otherwise they finish where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """The worker may take requests again."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing happened but time; deadlines are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownRequested:
    """End every request now."""


Event = (
    FrontendJoined
    | FrontendLost
    | RequestArrived
    | RequestCancelled
    | ResumeAsked
    | RequestsDropped
    | LogsRestored
    | StopMatched
    | CreditGranted
    | WorkerHello
    | WorkerLost
    | WorkerCompiling
    | GrammarReported
    | StepDone
    | DrainRequested
    | ResumeRequested
    | TimePassed
    | ShutdownRequested
)
