"""Forecast: the times of a request's start, first token and end, and its computing time.

Times are estimated with the workers' cost models, and lengths from similar finished requests (`output_lengths`). Only
uncached tokens and competing requests count; requests that are held for their tenant's quota delay no other request.
The estimates are corrected by the errors of earlier estimates (`calibration`).

If a request must wait until others end, its wait is the number of requests before it divided by the rate at which
blocked requests were admitted in the last `_WINDOW_S`. Initially, this rate is the number of running requests divided
by the time of a request.

Before the first measurement, times are 0 and lengths are unknown. `max_tokens` is not used as a forecast, because most
clients do not set it and the limit is then the rest of the context. No request is therefore rejected because of
`max_tokens`.
"""

from collections import deque
from itertools import islice
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
_CAUTION = 0.8
"""Share of the expected service time that every request is assumed to take."""


class Queue(NamedTuple):
    """The requests that compete when a request arrives."""

    num_requests: int
    num_tokens: int
    """Their uncached tokens."""


class Forecast:
    """Forecasts of one core; times in seconds."""

    def __init__(self, fleet: Fleet, config: CoreConfig) -> None:
        self.lengths = OutputLengths()
        self.waits, self.first_tokens, self.ends = Calibration(), Calibration(), Calibration()
        self._fleet = fleet
        self._config = config
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
        most = request.limit - request.spec.num_prompt_tokens
        if hint:
            return min(hint, most)
        like = self.lengths.like(request)
        return min(sum(like) / len(like), most) if like else most

    def _lengths(self, request: Request) -> tuple[float, float, float] | None:
        """Return the 5th, 50th and 90th percentile of the request's output length; None if unknown."""
        if request.spec.pooling:
            return 0.0, 0.0, 0.0
        most = float(request.limit - request.spec.num_prompt_tokens)
        if request.spec.expected_output_tokens:
            hint = min(float(request.spec.expected_output_tokens), most)
            return hint, hint, hint
        like = self.lengths.like(request, request.num_generated)
        if not like:
            return None
        return min(most, quantile(like, 0.05)), min(most, quantile(like, 0.5)), min(most, quantile(like, 0.9))

    # ---------------------------------------------------------------- service

    def uncached_tokens(self, request: Request) -> int:
        """Return the number of the request's tokens that no available worker has cached."""
        return len(request.tokens) - max((worker.cached_tokens(request) for worker in self._likely(request)), default=0)

    def service_s(self, request: Request, uncached: int, num_outputs: float) -> float:
        """Return the time to compute the request's uncached tokens and to generate the rest of its output."""
        worker = next(iter(self._likely(request)), None)
        if worker is None or not worker.costs.is_measured:
            return 0.0
        return uncached * worker.costs.prompt_token_s + num_outputs * worker.decode_step_s

    def must_start(self, request: Request, uncached: int) -> float | None:
        """Return the latest start at which the request may complete by the client's deadline; None without one.

        The estimate is optimistic: nearly all similar requests take longer and generate more tokens.
        """
        if request.deadline is None:
            return None
        lengths = self._lengths(request)
        rest = max(0.0, lengths[0] - request.num_generated) if lengths is not None else 0.0
        return request.deadline - _CAUTION * self.service_s(request, uncached, rest)

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

    def predict(self, request: Request, uncached: int, queue: Queue, now: float) -> Prediction | None:
        """Return the times of a request that arrives now; None before the first measurement.

        Args:
            request: the request, which is not part of the queue.
            uncached: its uncached tokens.
            queue: the requests that compete.
            now: the time, s.
        """
        worker = self._worker_for(request)
        if worker is None or not worker.costs.is_measured:
            return None
        num_workers = max(1, len(self._fleet))
        present = self._residual_s(worker, now)
        is_blocked = self._is_blocked(worker, queue.num_requests)
        wait = present
        if is_blocked:
            wait += (queue.num_requests + 1) / self._admission_rate(request, worker, num_workers, now)
        ahead = worker.prefill_backlog() + queue.num_tokens / num_workers
        rows, budget = worker.rows.num_running, self._chunk_budget(worker)
        context = worker.rows.num_table_blocks * worker.rows.block_size
        queued = worker.costs.prefill_s(ahead, rows, context, budget) if ahead else 0.0
        wait = max(wait, present + queued)
        first = wait + worker.costs.prefill_s(uncached, rows, context, budget)
        lengths = self._lengths(request)
        end = None
        if lengths is not None:
            step_s = worker.decode_step_s + worker.mean_chunks * worker.costs.prompt_token_s
            bases = tuple(first + step_s * max(0.0, each - 1) for each in lengths)
            end = self.ends.estimate(bases, is_blocked=is_blocked)
        return Prediction(
            is_blocked,
            self.waits.estimate((wait,) * 3, is_blocked=is_blocked),
            self.first_tokens.estimate((first,) * 3, is_blocked=is_blocked),
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

    def _likely(self, request: Request) -> list[Worker]:
        """Return workers that may run the request; workers that have cached the beginning of its prompt come first."""
        workers = [worker for worker in self._fleet if not worker.draining]
        if len(workers) > _MAX_LOOKS:
            with_prefix = set(self._fleet.directory.epochs(next(iter(request.keys.values()), b"")[:KEY_BYTES]))
            workers = [*sorted(workers, key=lambda worker: worker.epoch not in with_prefix)]
        return list(islice(workers, _MAX_LOOKS))

    def _worker_for(self, request: Request) -> Worker | None:
        """Return the likely worker that would compute the request's prompt soonest."""
        likely = self._likely(request)
        if len(likely) < 2:
            return likely[0] if likely else None
        return min(likely, key=lambda worker: worker.prefill_backlog() - worker.cached_tokens(request))

    def _is_blocked(self, worker: Worker, num_competing: int) -> bool:
        """Return whether a request that arrives must wait until others end."""
        if worker.rows.num_running >= min(self._config.max_num_seqs, worker.rows.max_rows):
            return True
        return num_competing > 0 and worker.obstacle in (WaitReason.ROWS, WaitReason.MEMORY)

    def _residual_s(self, worker: Worker, now: float) -> float:
        """Return the time until the results of the steps in flight arrive."""
        if not worker.in_flight:
            return 0.0
        first, *others = worker.in_flight
        rest = max(0.0, first.started + first.expected_s - now)
        return rest + sum(step.expected_s for step in others)

    def _chunk_budget(self, worker: Worker) -> int:
        """Return the number of prompt tokens per step."""
        return max(1, min(self._config.max_num_batched_tokens, worker.max_tokens_per_step) - worker.rows.num_running)

    def _admission_rate(self, request: Request, worker: Worker, num_workers: int, now: float) -> float:
        """Return how many blocked requests all workers together admit per second."""
        times = self._admissions
        while times and now - times[0] > _WINDOW_S:
            times.popleft()
        step_s = worker.decode_step_s + worker.mean_chunks * worker.costs.prompt_token_s
        # A running request is at least as long as it is now.
        held_s = step_s * max(1.0, self.learned_output_tokens(request), worker.rows.mean_generated())
        rows = max(1, worker.rows.num_running)
        # Weight the prior like the admission of one batch of rows.
        measured_s = now - times[0] if times else 0.0
        return (len(times) + rows * num_workers) / (measured_s + held_s)
