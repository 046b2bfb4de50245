"""Applies a step result: appends tokens to each request, and finds the requests that have ended.

Tokens of rows that still have the same request are handled as arrays. A request that has left its row (because its last
step was planned, it was preempted, or it ended) is found among the worker's departures. Tokens for an ended request are
discarded and counted as a cost of planning ahead.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, ONE, IndexArray, Int32Array, any_of, spread, where
from scheduler_svc.core.interface.errors import ProtocolViolationError
from scheduler_svc.core.interface.events import FailedRow, RowScores, StepDone
from scheduler_svc.core.interface.records import NoteKind
from scheduler_svc.core.planning.energy import charge
from scheduler_svc.core.planning.row_failures import FailedRequest
from scheduler_svc.core.requests.request import Request, RequestState
from scheduler_svc.core.workers.rows import FREE
from scheduler_svc.core.workers.steady_rows import SteadyRows
from scheduler_svc.core.workers.steps_in_flight import StepInFlight
from scheduler_svc.core.workers.worker import Worker

_COMPILED = 4.0
"""A step of a worker that reports a compilation is not measured if it takes more than this many times its expected
time.
"""
_CHUNKS_GAIN = 0.02
"""Weight of the newest step in the mean number of chunk tokens per step."""
_LEAST_CHUNKS = 0.01
"""A mean below this number of tokens counts as 0."""


@dataclass(slots=True)
class Settled:
    """The outcome of one step."""

    rows: IndexArray
    """Rows that got tokens and are still occupied by the same request."""
    tokens: Int32Array
    """Their tokens, grouped by row."""
    first_indices: Int32Array
    """Index of each row's first token here among the row's generated tokens."""
    counts: Int32Array | None = None
    """Number of tokens per row; None if each row has one."""
    streams: Int32Array | None = None
    """Streams of the rows, if they are known."""
    late: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, index, token) for requests that had left their row."""
    stopped: list[tuple[Request, int]] = field(default_factory=list)
    """Requests whose newest token is a stop token, with that token."""
    at_limit: list[Request] = field(default_factory=list)
    """Requests that have all tokens they may have on this worker."""
    ending: Sequence[int] = ()
    """Rows that reach their limit with the steps in flight, because drafts were accepted. They need no further step."""
    failed: list[FailedRequest] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    """Requests that got their first token."""
    prefilled: list[Request] = field(default_factory=list)
    """Traced requests whose attempt got its first token."""
    scores: list[tuple[Request, int, bool, bytes]] = field(default_factory=list)
    """(request, index of the first token, whether it is a prompt token, log-probabilities)."""
    embedded: list[tuple[Request, bytes]] = field(default_factory=list)
    """Requests with their completed embeddings, float32 bytes."""


def settle(worker: Worker, event: StepDone, now: float) -> Settled:
    """Apply the result of the oldest step in flight.

    Raises:
        ProtocolViolationError: the step is not the oldest in flight, or the result does not match the plan.
    """
    if not worker.in_flight or worker.in_flight[0].step != event.step:
        expected = worker.in_flight[0].step if worker.in_flight else None
        raise ProtocolViolationError(f"result of step {event.step}: step {expected} was expected")
    record = worker.in_flight[0]
    answered, generations, limits = record.rows, record.generations, record.draft_limits
    if event.failures:
        # A failure with another generation does not belong to this step, so a row is missing from the result.
        failed = {(failure.row, failure.generation) for failure in event.failures}
        uses = zip(answered.tolist(), generations.tolist(), strict=True)
        kept = np.array([use not in failed for use in uses], np.bool_)
        answered, generations = answered[kept], generations[kept]
        limits = limits[kept] if limits is not None else None
    steady = worker.rows.steady
    if steady is not None and steady.rows is not answered:
        steady = None
    # Comparing bytes takes a fifth of the time of `np.array_equal`.
    planned = answered.astype(np.int32).tobytes() if steady is None else steady.column
    if planned != event.rows.tobytes():
        raise ProtocolViolationError(f"result of step {event.step}: its rows are not those of the plan")
    drafts = None
    if limits is not None or event.counts is not None or event.draft_counts is not None:
        drafts = _drafts(event, limits)
    elif len(event.tokens) != len(event.rows):
        raise ProtocolViolationError(f"result of step {event.step}: {len(event.tokens)} tokens for its rows")
    # As unsigned numbers, negative ids are large, so one comparison checks both bounds.
    if worker.facts.holds(any_of(event.tokens.view(np.uint32) >= worker.vocab_size)):
        raise ProtocolViolationError(f"result of step {event.step}: a sampled token is outside the vocabulary")

    if record.pooled or event.embeddings:
        _check_embeddings(worker, record, event)
    if record.copy_ids and not set(record.copy_ids) <= set(event.completed_copies):
        raise ProtocolViolationError(f"result of step {event.step}: block copies of the plan are missing")

    worker.in_flight.popleft()
    worker.answered_step = record.step
    _measure(worker, record, event, 0 if drafts is None else drafts.num_verified, now)
    if event.energy_j:
        charge(worker, record, event)
    if worker.in_flight:
        next_step = worker.in_flight[0]
        next_step.started = now
        next_step.successor_due = now + worker.timing.lead(next_step.least_s)
    before: dict[tuple[int, int], tuple[Request, int] | None] = {}
    if event.scores:
        before = {(each.row, each.generation): _find(worker, each) for each in event.scores}
    if drafts is None or not drafts.num_verified:
        settled = _settle_rows(worker, answered, generations, event.tokens, steady, now)
        if limits is not None:
            own = limits if len(settled.rows) == len(answered) else limits[np.isin(answered, settled.rows)]
            worker.rows.drafts[settled.rows] -= own
    else:
        settled = _settle_drafts(worker, answered, generations, drafts, event.tokens, now)
    if event.scores:
        settled.scores = _scores(worker, event, before)
    if event.embeddings:
        _settle_embeddings(worker, event, settled)
    if record.prefilled and worker.pool.cache.partial is not None:
        worker.publisher.prove_prefilled(np.intersect1d(record.prefilled, settled.rows))
    if event.failures:
        # Count a row that fails in two ways at once as one failure.
        failures = {(failure.row, failure.generation): failure for failure in event.failures}
        found = [_failed_request(worker, failure) for failure in failures.values()]
        settled.failed = [failed for failed in found if failed is not None]
    for row in record.prefilled:
        request = worker.rows.requests[row]
        if request is None:
            continue
        if worker.rows.num_generated(row) == 1:
            request.note(now, NoteKind.FIRST_TOKEN, "first token")
            settled.first_tokens.append(request)
        if request.spec.traceparent:
            settled.prefilled.append(request)
    if worker.departed:
        _settle_departures(worker, record.step)
    worker.pool.step_answered(record.step)
    worker.swap.pool.step_answered(record.step)
    return settled


def _measure(worker: Worker, record: StepInFlight, event: StepDone, num_drafts: int, now: float) -> None:
    """Update the worker's cost model, plan timing and speculation from a step result."""
    costs, shape = worker.costs, record.shape
    duration = now - record.started
    if event.copied_blocks:
        # A step that only copies shows nothing about the delay of others.
        delay_s = event.copy_delay_s if shape.rows + shape.prompt_tokens else None
        costs.copies_measured(event.copied_blocks, event.copy_s, delay_s)
    duration -= event.copy_delay_s
    if record.goes_on:
        worker.timing.idled(record.expected_s, event.idle_s)
    if record.started < worker.compiling_until and 0.0 < _COMPILED * costs.expected_s(shape) < duration:
        pass  # The worker probably compiled a kernel in this step, so the time says nothing about its speed.
    elif worker.speculation.max_drafts:
        allowed = record.draft_limits is not None
        if allowed:
            shape = shape._replace(drafts=num_drafts)
        if not shape.prompt_tokens:
            worker.speculation.measured(shape, len(event.tokens), duration, allowed=allowed)
        costs.measured(shape, duration, drafts_allowed=allowed)
    else:
        costs.measured(shape, duration)
    if shape.prompt_tokens:
        worker.prefill = shape
        worker.mean_chunks += _CHUNKS_GAIN * (shape.prompt_tokens - worker.mean_chunks)
    elif worker.mean_chunks:
        mean = worker.mean_chunks * (1.0 - _CHUNKS_GAIN)
        worker.mean_chunks = mean if mean > _LEAST_CHUNKS else 0.0


@dataclass(slots=True)
class _Drafts:
    """The validated draft columns of a result, in the order of the result's rows."""

    counts: Int32Array
    verified: Int32Array
    limits: Int32Array
    num_verified: int


def _drafts(event: StepDone, limits: Int32Array | None) -> _Drafts:
    """Check the draft columns against the rows' limits.

    Raises:
        ProtocolViolationError: the columns contradict each other or the limits.
    """
    num_rows = len(event.rows)
    limits = np.zeros(num_rows, np.int32) if limits is None else limits
    counts = np.ones(num_rows, np.int32) if event.counts is None else event.counts
    verified = np.zeros(num_rows, np.int32) if event.draft_counts is None else event.draft_counts
    if len(counts) != num_rows or len(verified) != num_rows or int(counts.sum()) != len(event.tokens):
        raise ProtocolViolationError(
            f"result of step {event.step}: the numbers of tokens and drafts do not fit its rows"
        )
    if any_of((verified < 0) | (verified > limits) | (counts < ONE) | (counts > verified + ONE)):
        raise ProtocolViolationError(
            f"result of step {event.step}: a row has more tokens or drafts than the plan allows"
        )
    return _Drafts(counts, verified, limits, int(verified.sum()))


def _settle_rows(
    worker: Worker,
    answered: IndexArray,
    generations: Int32Array,
    tokens: Int32Array,
    steady: SteadyRows | None,
    now: float,
) -> Settled:
    rows = worker.rows
    late: list[tuple[int, int, int]] = []
    streams = stops = None
    if steady is not None:
        # No row was left since the step was planned.
        streams, stops = steady.streams, steady.stops
    elif worker.departed:
        alive = (rows.generation[answered] == generations) & (rows.state[answered] != FREE)
        gone = ~alive
        late = list(zip(answered[gone].tolist(), generations[gone].tolist(), tokens[gone].tolist(), strict=True))
        answered, tokens = answered[alive], tokens[alive]
    first_indices = rows.commit(answered, tokens) if steady is None else rows.commit_steady(tokens)
    settled = Settled(answered, tokens, first_indices, None, streams)
    worker.counters.generated_tokens += len(tokens)
    for position in worker.facts.stopped(rows.stopped(answered, tokens, stops)).tolist():
        request = rows.requests[int(answered[position])]
        assert request is not None
        settled.stopped.append((request, int(tokens[position])))
    for row, generation, token in late:
        departure = worker.departed[row, generation]
        worker.publisher.prove_departed(departure)
        _settle_late(worker, departure.request, token, settled, now)
    return settled


def _settle_drafts(
    worker: Worker, answered: IndexArray, generations: Int32Array, drafts: _Drafts, tokens: Int32Array, now: float
) -> Settled:
    """Apply the tokens of a step in which rows may have verified drafts."""
    rows, counts, verified, limits = worker.rows, drafts.counts, drafts.verified, drafts.limits
    worker.counters.drafting_rows += int(np.count_nonzero(verified))
    worker.counters.draft_tokens += drafts.num_verified
    worker.counters.accepted_draft_tokens += len(tokens) - len(answered)
    late: list[tuple[int, int, int, list[int]]] = []
    if worker.departed:
        alive = (rows.generation[answered] == generations) & (rows.state[answered] != FREE)
        ends = counts.cumsum()
        for at in where(~alive).tolist():
            end, count = int(ends[at]), int(counts[at])
            own = tokens[end - count : end].tolist()
            late.append((int(answered[at]), int(generations[at]), int(verified[at]), own))
        tokens = tokens[np.repeat(alive, counts)]
        answered, counts, verified, limits = answered[alive], counts[alive], verified[alive], limits[alive]
    rows.verified(answered, verified, counts - ONE)
    rows.drafts[answered] -= limits
    # Count only the tokens up to a stop token and within the request's limit.
    owner = np.repeat(np.arange(len(answered)), counts)
    place = spread(np.zeros_like(counts), counts)
    kept = np.minimum(counts, rows.limit[answered] - rows.committed[answered])
    stops: list[tuple[int, int]] = []
    for position in worker.facts.stopped(rows.stopped(answered[owner], tokens)).tolist():
        at = int(owner[position])
        if place[position] < kept[at]:
            kept[at] = place[position] + 1
            stops.append((at, int(tokens[position])))
    if len(tokens) > int(kept.sum()):
        worker.counters.discarded_tokens += len(tokens) - int(kept.sum())
        tokens = tokens[place < kept[owner]]
    rows.length[answered] = np.minimum(rows.length[answered] + kept - ONE, rows.limit[answered])
    settled = Settled(answered, tokens, rows.commit(answered, tokens, kept), kept)
    worker.counters.generated_tokens += len(tokens)
    for at, token in stops:
        request = rows.requests[int(answered[at])]
        assert request is not None
        settled.stopped.append((request, token))
    stopped = {int(answered[at]) for at, _ in stops}
    ending: list[int] = []
    for row in answered[rows.length[answered] == rows.limit[answered]].tolist():
        request = rows.requests[row]
        assert request is not None
        if row in stopped:
            continue
        if rows.committed[row] == rows.limit[row]:
            settled.at_limit.append(request)
        else:
            ending.append(row)
    settled.ending = ending
    for row, generation, num_verified, own in late:
        departure = worker.departed[row, generation]
        worker.publisher.prove_departed(departure)
        request = departure.request
        request.drafted_tokens += num_verified
        request.accepted_tokens += len(own) - 1
        for number, token in enumerate(own):
            if not _settle_late(worker, request, token, settled, now):
                worker.counters.discarded_tokens += len(own) - number - 1
                break
    return settled


def _settle_late(worker: Worker, request: Request, token: int, settled: Settled, now: float) -> bool:
    """Apply a token for a request that has left its row; return whether another of the step's tokens may follow."""
    # Without drafts, a step may be planned before the worker's context is full and sample beyond it.
    if request.state is RequestState.FINISHED or len(request.tokens) >= worker.max_model_len:
        worker.counters.discarded_tokens += 1
        return False
    index = request.num_generated
    if not index:
        request.note(now, NoteKind.FIRST_TOKEN, "first token")
        settled.first_tokens.append(request)
    settled.late.append((request, index, token))
    request.tokens.append(token)
    worker.counters.generated_tokens += 1
    if worker.facts.holds(token in request.stop_token_ids):
        settled.stopped.append((request, token))
        return False
    if len(request.tokens) >= request.limit or (
        request.state is RequestState.ENDING and len(request.tokens) >= worker.max_model_len
    ):
        settled.at_limit.append(request)
        return False
    return True


def _check_embeddings(worker: Worker, record: StepInFlight, event: StepDone) -> None:
    """Check that the result has the planned embeddings in the model's size. Failed rows have none.

    Raises:
        ProtocolViolationError: the embeddings are not the planned ones.
    """
    failed = {(failure.row, failure.generation) for failure in event.failures}
    answered = sorted((each.row, each.generation) for each in event.embeddings)
    num_bytes = 4 * worker.model.hidden_size
    if answered != sorted(set(record.pooled) - failed) or any(len(e.values) != num_bytes for e in event.embeddings):
        raise ProtocolViolationError(f"result of step {event.step}: its embeddings are not those of the plan")


def _settle_embeddings(worker: Worker, event: StepDone, settled: Settled) -> None:
    for embedding in event.embeddings:
        departure = worker.departed[embedding.row, embedding.generation]
        worker.publisher.prove_departed(departure)
        if departure.request.state is not RequestState.FINISHED:
            settled.embedded.append((departure.request, embedding.values))


def _find(worker: Worker, scores: RowScores) -> tuple[Request, int] | None:
    """Return the request for log-probabilities and its number of generated tokens; None if it has ended."""
    row = scores.row
    if 0 <= row < worker.rows.max_rows and worker.rows.generation[row] == scores.generation:
        request = worker.rows.requests[row]
        if request is not None:
            return request, worker.rows.num_generated(row)
    departure = worker.departed.get((row, scores.generation))
    if departure is None or departure.request.state is RequestState.FINISHED:
        return None
    return departure.request, departure.request.num_generated


def _scores(
    worker: Worker, event: StepDone, before: dict[tuple[int, int], tuple[Request, int] | None]
) -> list[tuple[Request, int, bool, bytes]]:
    """Return the log-probabilities with their requests, without those of discarded tokens.

    Args:
        worker: the worker, after the step's tokens were applied.
        event: the result.
        before: what `_find` returned before the tokens were applied, by row and generation.
    """
    found = []
    taken: Counter[tuple[int, int]] = Counter()
    for scores in event.scores:
        key = scores.row, scores.generation
        known = before[key]
        if known is None:
            continue
        request, index = known
        if scores.prompt_index:
            found.append((request, scores.prompt_index, True, scores.scores))
            continue
        index += taken[key]
        taken[key] += 1
        now = _find(worker, scores)
        if now is not None and index < now[1]:
            found.append((request, index, False, scores.scores))
    return found


def _settle_departures(worker: Worker, step: int) -> None:
    for key, departure in list(worker.departed.items()):
        if departure.last_step <= step:
            del worker.departed[key]
            departure.request.unsettled = False


def _failed_request(worker: Worker, failure: FailedRow) -> FailedRequest | None:
    """Return the failed request, or None if the row is unknown or its failure was handled before."""
    rows, row = worker.rows, failure.row
    if not 0 <= row < rows.max_rows:
        return None
    request = rows.requests[row]
    if request is not None and rows.generation[row] == failure.generation:
        window_blocks = NO_INDICES if worker.windows is None else worker.windows.suspects(row)
        blocks, num_shared = rows.blocks(row).copy(), rows.shared.item(row)
        return FailedRequest(request, failure, blocks, num_shared, window_blocks, in_row=True)
    departure = worker.departed.get((row, failure.generation))
    if departure is None or departure.failure_handled:
        return None
    departure.failure_handled = True
    return FailedRequest(
        departure.request, failure, departure.blocks, departure.num_shared, departure.window_blocks, in_row=False
    )
