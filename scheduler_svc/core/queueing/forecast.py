"""Forecast: the times of a request's start, first token and end, and its computing time.

Times are estimated with the workers' cost models, and lengths from similar finished requests (`output_lengths`). Only
uncached tokens and competing requests count, because requests held for their tenant's quota delay no other request.
Errors of earlier estimates correct later ones (`calibration`).

If a request must wait until others end, its wait is estimated as the number of requests before it, divided by the rate
at which blocked requests were admitted in the last `_WINDOW_S`. Initially, this rate is the number of running requests
divided by one request's duration.

Before the first measurement, times are 0 and lengths are unknown. `max_tokens` is not used as a forecast, because most
clients do not set it and the limit is then the rest of the context. No request is therefore rejected because of
`max_tokens`.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import WaitReason
from scheduler_svc.core.queueing.calibration import Calibration
from scheduler_svc.core.queueing.output_lengths import OutputLengths, quantile
from scheduler_svc.core.requests.prediction import Prediction
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.fleet import Fleet
from scheduler_svc.core.workers.worker import Worker
from shared.prefix_keys import KEY_BYTES

_WINDOW_S = 60.0
_MAX_ADMISSIONS = 256
"""Maximum number of admissions in the measurement window."""
_MAX_LOOKS = 4
"""Maximum number of workers considered per forecast."""


class _Pace(NamedTuple):
    """The present state of a worker, as far as forecasts need it; times in seconds."""

    backlog: int
    """Prompt tokens in its rows that are not planned yet."""
    decode_s: float
    """Time of a step that only decodes."""
    step_s: float
    """Expected time of a step."""
    residual_s: float
    """Time until the results of the steps in flight arrive."""
    budget: int
    """Prompt tokens per step."""
    hash_block_size: int
    """Size of the blocks if only whole blocks are cached; 0 if parts are cached, too."""
    is_full: bool
    """Whether all its rows are in use."""
    is_obstructed: bool
    """Whether the requests that compete for it lack a row or memory."""


class Forecast:
    """Forecasts of one core; times in seconds."""

    def __init__(self, fleet: Fleet, config: CoreConfig) -> None:
        self.lengths = OutputLengths()
        self.waits, self.first_tokens, self.ends = Calibration(), Calibration(), Calibration()
        self._fleet = fleet
        self._config = config
        self._paces: dict[Worker, _Pace] = {}
        """The state of workers at `_paces_at`, for requests that arrive."""
        self._paces_at = 0.0
        self._soonest: dict[int, Worker | None] = {}
        """By block size, the worker that would soonest compute a prompt that no worker has cached, at `_paces_at`."""
        self._admissions: deque[float] = deque(maxlen=_MAX_ADMISSIONS)
        """Times of the last admissions of blocked requests, since at least one has always been waiting."""

    # ---------------------------------------------------------------- lengths

    def output_tokens(self, request: Request) -> float:
        """Return the expected total number of tokens that the request generates."""
        return self._mean_tokens(request, request.spec.expected_output_tokens)

    def learned_output_tokens(self, request: Request) -> float:
        """Return the expected total output tokens from finished requests, without the client's hint."""
        return self._mean_tokens(request, 0)

    def _mean_tokens(self, request: Request, hint: int) -> float:
        if request.spec.pooling:
            return 0.0
        if hint:
            return min(hint, request.limit - request.spec.num_prompt_tokens)
        return _mean(request, self.lengths.like(request))

    # ---------------------------------------------------------------- service

    def workers_change(self) -> None:
        """Drop the state of the workers, because one of them is about to change."""
        if self._paces:
            self._paces.clear()
            self._soonest.clear()

    def look_up(self, request: Request, now: float) -> tuple[Worker | None, int]:
        """For a request that arrives, return the worker that would compute it soonest, and `uncached_tokens`."""
        found, soonest, most_cached = None, 0, 0
        holders, block_size = self._holders(request), _block_size_of_keys(request)
        if not holders and block_size > 0:
            found = self._soonest_without_prefix(block_size, now)
            if found is not None:
                return found, len(request.tokens)
        for worker in self._likely(holders):
            pace = self._pace(worker, now)
            num_cached = 0
            if worker.epoch in holders or pace.hash_block_size != block_size:
                num_cached = worker.prefixes.cached_tokens(request)
            ahead = pace.backlog - num_cached
            if found is None or ahead < soonest:
                found, soonest = worker, ahead
            if num_cached > most_cached:
                most_cached = num_cached
        return found, len(request.tokens) - most_cached

    def uncached_tokens(self, request: Request) -> int:
        """Return the number of the request's tokens that no worker has cached."""
        likely = self._likely(self._holders(request))
        return len(request.tokens) - max((worker.prefixes.cached_tokens(request) for worker in likely), default=0)

    def service_s(self, request: Request, uncached: int, num_outputs: float) -> float:
        """Return the time to compute the request's uncached tokens and to generate the rest of its output."""
        worker = next(iter(self._likely(self._holders(request))), None)
        if worker is None or not worker.costs.is_measured:
            return 0.0
        return uncached * worker.costs.prompt_token_s + num_outputs * worker.decode_step_s

    def must_start(self, request: Request, uncached: int) -> float | None:
        """Return the latest start at which the request may meet the client's deadline; None without a deadline.

        The estimate is optimistic: nearly all similar requests take longer and generate more tokens. While little is
        known about a worker's speed, as after a disturbance, the request may take no time at all.
        """
        if request.deadline is None:
            return None
        lengths = _quantiles(request, self._like(request))
        rest = max(0.0, lengths[0] - request.num_generated) if lengths is not None else 0.0
        workers = self._likely(self._holders(request))
        return request.deadline - min((worker.least_service_s(uncached, rest) for worker in workers), default=0.0)

    def latest_start(self, request: Request, uncached: int) -> float | None:
        """Return the latest start that meets the request's deadline and targets; None without any."""
        starts = []
        if request.ttft_deadline is not None and not request.num_generated:
            starts.append(request.ttft_deadline - self.service_s(request, uncached, 0.0))
        if request.total_deadline is not None:
            rest = max(0.0, self.output_tokens(request) - request.num_generated)
            starts.append(request.total_deadline - self.service_s(request, uncached, rest))
        return min(starts, default=None)

    # ---------------------------------------------------------------- predictions

    def predict(
        self,
        request: Request,
        uncached: int,
        worker: Worker | None,
        num_competing: int,
        competing_tokens: int,
        now: float,
    ) -> Prediction | None:
        """Return the forecast times for a request that arrives now; None before the first measurement.

        Args:
            request: the request, which does not compete yet.
            uncached: its uncached tokens.
            worker: the worker that would compute it soonest, if there is one.
            num_competing: number of requests that compete.
            competing_tokens: their uncached tokens.
            now: the time, s.
        """
        if worker is None or not worker.costs.is_measured:
            return None
        num_workers, costs = len(self._fleet), worker.costs
        backlog, decode_s, step_s, present, budget, _, is_full, is_obstructed = self._pace(worker, now)
        like = self._like(request)
        is_blocked = is_full or (num_competing > 0 and is_obstructed)
        wait = present
        if is_blocked:
            length = _mean(request, self.lengths.like(request) if request.spec.expected_output_tokens else like)
            wait += (num_competing + 1) / self._admission_rate(worker, step_s, length, num_workers, now)
        ahead = backlog + competing_tokens / num_workers
        queued = costs.prefill_s(ahead, budget, decode_s) if ahead else 0.0
        wait = max(wait, present + queued)
        first = wait + costs.prefill_s(uncached, budget, decode_s)
        lengths = _quantiles(request, like)
        end = None
        if lengths is not None:
            low, median, high = lengths
            end = self.ends.estimate(
                (
                    first + step_s * max(0.0, low - 1),
                    first + step_s * max(0.0, median - 1),
                    first + step_s * max(0.0, high - 1),
                ),
                is_blocked=is_blocked,
            )
        return Prediction(
            is_blocked,
            self.waits.estimate((wait, wait, wait), is_blocked=is_blocked),
            self.first_tokens.estimate((first, first, first), is_blocked=is_blocked),
            end,
        )

    def admitted(self, prediction: Prediction | None, seconds: float, num_waiting: int, now: float) -> None:
        """Record the first admission of a request.

        Args:
            prediction: what was forecast for it.
            seconds: from its arrival.
            num_waiting: requests that still compete.
            now: the time, s.
        """
        if prediction is None:
            return
        self.waits.happened(prediction.wait, seconds)
        if prediction.is_blocked:
            self._admissions.append(now)
        if not num_waiting:
            self._admissions.clear()

    def had_first_token(self, prediction: Prediction | None, seconds: float) -> None:
        """Record the first token of a request, `seconds` after its arrival."""
        if prediction is not None:
            self.first_tokens.happened(prediction.first_token, seconds)

    def finished(self, request: Request, prediction: Prediction | None, seconds: float) -> None:
        """Record the end of a completed request, `seconds` after its arrival."""
        self.lengths.finished(request)
        if prediction is not None and prediction.end is not None:
            self.ends.happened(prediction.end, seconds)

    # ----------------------------------------------------------------

    def _holders(self, request: Request) -> Collection[int]:
        """Return the epochs of the workers that have cached the first block of the request's prompt."""
        return self._fleet.directory.epochs(next(iter(request.keys.values()), b"")[:KEY_BYTES])

    def _likely(self, holders: Collection[int]) -> Iterable[Worker]:
        """Return a few workers that may run a request, first `holders`, which have cached the start of its prompt."""
        workers = self._fleet.open
        if len(workers) <= _MAX_LOOKS:
            return workers.values()
        if not holders:
            return islice(workers.values(), _MAX_LOOKS)
        first = (workers[epoch] for epoch in holders if epoch in workers)
        others = (worker for epoch, worker in workers.items() if epoch not in holders)
        return islice(chain(first, others), _MAX_LOOKS)

    def _pace(self, worker: Worker, now: float) -> _Pace:
        """Return the state of a worker. All requests that arrive at the same time share it."""
        if self._paces_at != now:
            self.workers_change()
            self._paces_at = now
        pace = self._paces.get(worker)
        if pace is None:
            costs, rows = worker.costs, worker.rows
            num_running = rows.num_running
            decode_s = costs.decode_s(num_running, rows.num_table_blocks * rows.block_size)
            step_s = decode_s if num_running else worker.decode_step_s
            pace = self._paces[worker] = _Pace(
                worker.prefill_backlog(),
                decode_s,
                step_s + worker.mean_chunks * costs.prompt_token_s,
                self._residual_s(worker, now),
                max(1, min(self._config.max_num_batched_tokens, worker.max_tokens_per_step) - num_running),
                rows.block_size if worker.pool.cache.partial is None else 0,
                num_running >= min(self._config.max_num_seqs, rows.max_rows),
                worker.obstacle in (WaitReason.ROWS, WaitReason.MEMORY),
            )
        return pace

    def _soonest_without_prefix(self, block_size: int, now: float) -> Worker | None:
        """Return the worker that would soonest compute a prompt whose first full block no worker has cached.

        None if there is no worker, or if one has blocks of another size than the prompt's keys.
        """
        if self._paces_at == now and block_size in self._soonest:
            return self._soonest[block_size]
        found, least = None, 0
        for worker in self._likely(()):
            pace = self._pace(worker, now)
            if pace.hash_block_size != block_size:
                found = None
                break
            if found is None or pace.backlog < least:
                found, least = worker, pace.backlog
        self._soonest[block_size] = found
        return found

    def _like(self, request: Request) -> Sequence[int]:
        """Return the lengths of similar finished requests with more tokens; empty if the estimate needs none."""
        if request.spec.pooling or request.spec.expected_output_tokens:
            return ()
        return self.lengths.like(request, request.num_generated)

    def _residual_s(self, worker: Worker, now: float) -> float:
        """Return the time until the results of the steps in flight arrive."""
        rest = 0.0
        for number, step in enumerate(worker.in_flight):
            rest += step.expected_s if number else max(0.0, step.started + step.expected_s - now)
        return rest

    def _admission_rate(self, worker: Worker, step_s: float, num_outputs: float, num_workers: int, now: float) -> float:
        """Return how many blocked requests all workers together admit per second.

        Args:
            worker: the worker that stands for all.
            step_s: time of its steps, s.
            num_outputs: expected output tokens per request.
            num_workers: number of workers.
            now: the time, s.
        """
        times = self._admissions
        while times and now - times[0] > _WINDOW_S:
            times.popleft()
        rows = max(1, worker.rows.num_running)
        # The final length of a running request is at least its current length.
        held_s = step_s * max(1.0, num_outputs, worker.rows.num_all_generated / rows)
        # Give the prior the weight of one batch of admissions.
        measured_s = now - times[0] if times else 0.0
        return (len(times) + rows * num_workers) / (measured_s + held_s)


def _block_size_of_keys(request: Request) -> int:
    """Return the block size for which the keys of all full blocks are known; -1 if there is none.

    A worker that caches whole blocks of this size has cached nothing of the request unless it has cached the first one.
    """
    if len(request.keys) != 1 or request.swapped is not None:
        return -1
    ((block_size, keys),) = request.keys.items()
    num_keys = len(keys) // KEY_BYTES
    return block_size if num_keys and len(request.tokens) // block_size <= num_keys else -1


def _mean(request: Request, like: Sequence[int]) -> float:
    """Return the expected output tokens, given the lengths of similar requests; the limit if there are none."""
    if request.spec.pooling:
        return 0.0
    most = request.limit - request.spec.num_prompt_tokens
    return min(sum(like) / len(like), most) if like else most


def _quantiles(request: Request, like: Sequence[int]) -> tuple[float, float, float] | None:
    """Return the 5th, 50th and 90th percentile of the output length; None if unknown.

    Args:
        request: the request, which may have a hint.
        like: the lengths of similar requests, ascending.
    """
    spec = request.spec
    if spec.pooling:
        return 0.0, 0.0, 0.0
    most = float(request.limit - spec.num_prompt_tokens)
    if spec.expected_output_tokens:
        hint = min(float(spec.expected_output_tokens), most)
        return hint, hint, hint
    if not like:
        return None
    return min(most, quantile(like, 0.05)), min(most, quantile(like, 0.5)), min(most, quantile(like, 0.9))
