"""Steps in flight on a worker, and the requests that have left rows which such steps may still sample."""

from dataclasses import dataclass

from scheduler_svc.core.interface.arrays import IndexArray, Int32Array
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.cost_model import StepShape


@dataclass(slots=True)
class StepInFlight:
    """A plan that was sent and has no result yet."""

    step: int
    rows: IndexArray
    """Rows that sample in the step, ascending."""
    generations: Int32Array
    """Generations of the rows when the step was planned."""
    draft_limits: Int32Array | None
    """Maximum number of drafts for each of `rows`; None if no row verifies drafts."""
    prefilled: list[int]
    """Subset of `rows` that sample the first token of this attempt."""
    pooled: list[tuple[int, int]]
    """(row, generation) of embeddings that this step completes. Their requests have left the rows."""
    shape: StepShape
    """Work of the step, with the maximum number of drafts."""
    expected_s: float
    """Expected time, s."""
    least_s: float
    """Lower bound on its time, s. Nearly all such steps take longer."""
    started: float
    """Known start on the worker, s: when the plan was sent or the predecessor's result arrived."""
    successor_due: float
    """Time at which to send the next plan, s."""
    goes_on: bool
    """Whether there was enough work to plan the step before its predecessor's result arrived."""
    chunk_rows: list[int]
    """Rows with a chunk of their prompt in the step."""
    chunk_generations: Int32Array
    """Generations of the chunk rows when the step was planned."""
    chunk_lengths: list[int]
    """Tokens of the chunks, in the order of `chunk_rows`."""
    solo: Request | None
    """The suspect, if the step holds no other request."""
    copy_ids: list[int]
    """Block copies in the step. All are done when its result arrives."""
    allowance: float
    """Maximum time from the start of the step to its result, s."""


@dataclass(slots=True)
class Departure:
    """A request that left a row which steps up to `last_step` may still sample."""

    request: Request
    last_step: int
    blocks: IndexArray
    """The blocks that the request held."""
    num_shared: int
    """Number of leading blocks that other requests have written."""
    num_tokens: int
    """Leading tokens whose KV is in the blocks. A token sampled later proves this KV."""
    window_blocks: IndexArray
    """The window blocks that the request has read or written."""
    failure_handled: bool = False
    """Whether the row has already failed or lost shared blocks. Later failures then have no effect."""
