"""Events: all inputs of the scheduler core.

Events contain only values. The sender has validated their form, such as equal column lengths and id ranges, but not
their meaning. The core must handle a stale epoch, an unknown stream or an unexpected row.

Events, effects and plans are never modified after creation. Classes that are instantiated for every step or request are
not frozen, because creating a frozen instance takes three times as long.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.interface.arrays import IndexArray, Int32Array
from scheduler_svc.core.interface.disk import DiskBlock
from scheduler_svc.core.interface.records import GrammarFailure as GrammarFailure
from scheduler_svc.core.interface.records import Log
from scheduler_svc.core.interface.records import Peer as Peer
from scheduler_svc.core.interface.records import RequestArrived as RequestArrived


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendJoined:
    """A front end has connected."""

    frontend: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLost:
    """A front end has left, its lease has expired, or its connection is lost. Its streams no longer have clients."""

    frontend: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The client of a stream is gone."""

    frontend: Peer
    stream: int
    keep: bool = False
    """Whether the client may reconnect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAsked:
    """A client wants to continue a request. If the request is live on another stream, that stream ends."""

    frontend: Peer
    number: int
    identity: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsDropped:
    """Command to end requests and drop their logs."""

    identities: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsRestored:
    """Logs from an earlier core, for requests whose clients may reconnect.

    This is the first event, if there are any.
    """

    logs: tuple[tuple[float, Log], ...]
    """(age in seconds, log), oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatched:
    """The front end found a stop string. Only the first `keep_tokens` generated tokens count."""

    frontend: Peer
    stream: int
    keep_tokens: int


@dataclass(slots=True, kw_only=True)
class CreditGranted:
    """A reader consumed `credit` bytes."""

    frontend: Peer
    stream: int
    credit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Properties of a worker's model, as the worker reports them."""

    name: str
    architecture: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0
    """Size of an embedding in elements; 0 if the worker makes no embeddings."""
    break_even_context: int = 0
    """Context length in tokens at which a token's attention costs as much as its products with the weights. 0 if the
    cost of attention does not grow with the context.
    """
    state_bytes: int = 0
    """Size of a row's recurrent state in bytes; 0 if a row has only KV.

    The state exists only at the row's newest computed token, so a row cannot go back. It can begin with computed tokens
    only from a checkpoint.
    """


class HelloReason(enum.Enum):
    """Reason why a worker connects."""

    STARTED = "its process has started"
    SESSION_LOST = "it had lost the scheduler"
    PROTOCOL_ERROR = "it was sent what it did not expect"
    STEP_FAILED = "a whole step failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedSequence:
    """A sequence whose KV is in a worker's blocks although its row was dropped."""

    root: bytes
    """Key before its first block."""
    tokens: bytes
    """Its tokens, int32."""
    blocks: IndexArray
    is_proven: bool
    """Whether a token was sampled from the whole sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """A worker connects or reconnects."""

    worker: Peer
    worker_id: str
    model: ModelFacts
    block_size: int
    num_blocks: int
    max_rows: int
    max_tokens_per_step: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    """Blocks that fit on its disk."""
    block_bytes: int = 0
    """Bytes of the KV in a block, on one rank; 0 if not known. For operators only."""
    cache_kinds: tuple[str, ...] = ()
    """Kinds of cache that the worker stores: "full", "latent", "window", "state". For operators only."""
    num_checkpoints: int = 0
    """Number of checkpoints of recurrent states that it can hold."""
    num_host_states: int = 0
    """Number of recurrent states of preempted requests that its host memory holds, numbered after the checkpoints."""
    num_kv_groups: int = 1
    """Number of block tables per row. All but the first are for layers with a window."""
    window: int = 0
    """Number of tokens that a token attends to in these layers, including itself; 0 if there is one group."""
    window_chunk: int = 0
    """Maximum number of tokens of one row in a step; 0 if there is one group."""
    max_draft_tokens: int = 0
    """Maximum number of drafts that the worker verifies per row and step; 0 if it does not speculate."""
    protocol_version: int = 0
    """Version of the plan protocol to use with it."""
    device: str = ""
    """Device that it computes on. For operators only."""
    pid: int = 0
    """Process ID on its machine. For operators only."""
    process: str = ""
    """Name of the process on its machine; the core does not read it."""
    reason: HelloReason = HelloReason.STARTED
    retained: tuple[RetainedSequence, ...] = ()
    """Sequences whose KV is still in the worker's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker's connection is lost, it has left, or it sent an invalid message."""

    worker: Peer
    reason: str
    orderly: bool = False
    """Whether the worker signed off. If so, none of its requests is blamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCompiling:
    """A worker compiles and sends nothing for up to `expected_s` seconds."""

    worker: Peer
    epoch: int
    expected_s: float


class FailureKind(enum.Enum):
    """Reason why a row failed. The names match RowFailureKind in the plan protocol."""

    NOT_FINITE = enum.auto()
    """Logits or hidden states contain NaN or infinity, so KV that the row wrote or read may contain them too."""
    NO_TOKEN_ALLOWED = enum.auto()
    """The request's constraints allow no token."""
    GRAMMAR_TOO_COSTLY = enum.auto()
    """The request's grammar needs more work for one token than is allowed."""
    INTERNAL = enum.auto()
    """The worker cannot continue the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A failed row, which does not affect the rest of its step."""

    row: int
    generation: int
    kind: FailureKind
    reason: str
    field: str = ""
    """The field of the request to change, if the request itself is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarReported:
    """A worker has compiled a grammar, or reports that it cannot."""

    worker: Peer
    epoch: int
    key: bytes
    failure: GrammarFailure | None = None
    """Why the worker cannot compile the grammar; None if it is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReported:
    """A worker has ended a disk job, or lists a part of its blocks on disk."""

    worker: Peer
    epoch: int
    copy_id: int = 0
    """The job; 0 if the report is a part of the list."""
    failed: tuple[int, ...] = ()
    """Positions of the job's blocks that were not copied."""
    seconds: float = 0.0
    """Duration of the job, s."""
    found: tuple[DiskBlock, ...] = ()
    """Blocks on disk from earlier epochs."""
    is_complete: bool = False
    """Whether the list is complete."""
    refused: tuple[tuple[str, int], ...] = ()
    """Refused files since the last report, by reason."""


@dataclass(slots=True, kw_only=True)
class RowScores:
    """Log-probabilities for a row's tokens, as bytes that the core forwards to the front end without decoding them."""

    row: int
    generation: int
    prompt_index: int
    """0 for the tokens sampled in this step. Otherwise the prompt index of the first token."""
    scores: bytes


@dataclass(slots=True, kw_only=True)
class RowEmbedding:
    """The embedding from a pooling row, as bytes that the core forwards to the front end without decoding them."""

    row: int
    generation: int
    values: bytes


@dataclass(slots=True, kw_only=True)
class StepDone:
    """A worker sent the result of a plan."""

    worker: Peer
    epoch: int
    step: int
    rows: Int32Array
    """Rows that sampled, ascending, `[n]`."""
    tokens: Int32Array
    """Tokens, grouped by row in the order of `rows`, `[sum(counts)]`."""
    counts: Int32Array | None = None
    """Number of tokens per row, `[n]`; None if each row gets one."""
    draft_counts: Int32Array | None = None
    """Number of drafts verified in each row, `[n]`; None if there were none."""
    failures: Sequence[FailedRow] = ()
    scores: Sequence[RowScores] = ()
    embeddings: Sequence[RowEmbedding] = ()
    """Embeddings from pooling rows with their last chunk in this step."""
    completed_copies: Sequence[int] = ()
    """Ids of the block copies that are done."""
    copied_blocks: int = 0
    copy_s: float = 0.0
    """Duration of these copies, s."""
    copy_delay_s: float = 0.0
    """How much longer the step took because of the copies, s; the rest of `copy_s` overlapped with the step."""
    idle_s: float = 0.0
    """Time that the device was idle before the step, s."""
    energy_j: float = 0.0
    """Energy that the device used for the step, J; 0 if not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """An operator drains a worker. No new request starts there."""

    worker_id: str
    move: bool
    """Whether running requests move to other workers if possible. Otherwise they finish on the drained worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """An operator resumes a drained worker. It may take requests again."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time has passed, so the core checks deadlines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownRequested:
    """Command to end every request now."""


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
    | DiskReported
    | StepDone
    | DrainRequested
    | ResumeRequested
    | TimePassed
    | ShutdownRequested
)
