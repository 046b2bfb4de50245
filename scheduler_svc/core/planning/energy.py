"""Energy of a step, divided among the requests in it. Pure.

A request's share is that of its tokens in the step: the tokens of its chunk, or one per decode row and verified draft.
So a step's fixed cost is shared, and a request that decodes alone pays for all of it.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.interface.arrays import IndexArray, Int32Array
from scheduler_svc.core.interface.events import StepDone
from scheduler_svc.core.workers.rows import FREE
from scheduler_svc.core.workers.steps_in_flight import StepInFlight
from scheduler_svc.core.workers.worker import Worker

FloatArray = npt.NDArray[np.float64]


def split(energy_j: float, tokens: Int32Array) -> FloatArray:
    """Return the energy of each row, `[n]`, in proportion to its tokens; 0 for all if there is no token."""
    total = int(tokens.sum())
    return tokens.astype(np.float64) * (energy_j / total if total else 0.0)


def charge(worker: Worker, record: StepInFlight, event: StepDone) -> None:
    """Charge a step's energy to its requests, before the result is applied.

    A request that has left its row is charged until all its steps have results. The share of an ended request is lost.
    """
    rows, generations, tokens = _computed(record, event)
    shares = split(event.energy_j, tokens)
    table = worker.rows
    is_alive = (table.generation[rows] == generations) & (table.state[rows] != FREE)
    table.energy_j[rows[is_alive]] += shares[is_alive]
    for at in np.flatnonzero(~is_alive).tolist():
        departure = worker.departed.get((int(rows[at]), int(generations[at])))
        if departure is not None:
            departure.request.energy_j += shares.item(at)


def _computed(record: StepInFlight, event: StepDone) -> tuple[IndexArray, Int32Array, Int32Array]:
    """Return the rows of a step with their generations and tokens. A row with a chunk is not a decode row."""
    if not record.chunk_rows and event.draft_counts is None:
        return record.rows, record.generations, np.ones(len(record.rows), np.int32)
    is_decode = ~np.isin(record.rows, record.prefilled)
    decodes = np.ones(len(record.rows), np.int32)
    if event.draft_counts is not None and len(event.draft_counts) == len(decodes):
        decodes = decodes + event.draft_counts
    return (
        np.concatenate((record.rows[is_decode], np.array(record.chunk_rows, np.intp))),
        np.concatenate((record.generations[is_decode], record.chunk_generations)),
        np.concatenate((decodes[is_decode], np.array(record.chunk_lengths, np.int32))),
    )
