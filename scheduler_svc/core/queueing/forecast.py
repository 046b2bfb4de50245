"""Forecast of a request's cost: output length, prefill time and decode time.

Output lengths are learned per tenant and power-of-two bucket of the prompt's length. Without data they fall back to the
tenant's mean, then to the mean of all tenants. Speeds are means of the cost models of all workers.

Before the first measurement, forecasts are None or the request's own limit. A limit is no forecast of a length, because
most clients set none and may then generate the rest of the context. So no request is rejected for its limit.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.worker import Worker

_SMOOTHING = 0.1
_CAUTION = 1.25
"""Safety factor on the forecast duration of a request."""
_MAX_KEYS = 10_000
"""Maximum number of remembered tenants and buckets; beyond that, learning starts again."""


@dataclass(slots=True)
class _Mean:
    value: float

    def add(self, sample: float) -> None:
        self.value += _SMOOTHING * (sample - self.value)


class Forecast:
    """Expected lengths, learned from finished requests, and the times that they take on the workers; times in s."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        """Start without lengths; `workers` are those that are connected, whenever it is iterated."""
        self._workers = workers
        self._lengths: dict[tuple[str, int], _Mean] = {}

    def request_finished(self, request: Request) -> None:
        """Record the output length of a completed request."""
        if len(self._lengths) > _MAX_KEYS:
            self._lengths.clear()
        lengths, generated = self._lengths, float(request.num_generated)
        for key in _keys(request):
            mean = lengths.get(key)
            if mean is None:
                lengths[key] = _Mean(generated)
            else:
                mean.add(generated)

    def output_tokens(self, request: Request) -> float:
        """Return the expected number of tokens that the request generates in all."""
        if request.spec.pooling:
            return 0.0
        most = request.limit - request.spec.num_prompt_tokens
        expected = self._expected_tokens(request)
        return most if expected is None else min(expected, most)

    def learned_output_tokens(self, request: Request) -> float:
        """Return how many tokens the request generates in all, as finished requests did; the hint does not count."""
        if request.spec.pooling:
            return 0.0
        most = request.limit - request.spec.num_prompt_tokens
        learned = self._learned_tokens(request)
        return most if learned is None else min(learned, most)

    def prefill_s(self, request: Request) -> float:
        """Return the time to compute the request's known tokens, s; 0 before the first measurement."""
        times = [worker.costs.prompt_token_s for worker in self._workers if worker.costs.is_measured]
        return len(request.tokens) * sum(times) / len(times) if times else 0.0

    def decode_s(self, request: Request) -> float:
        """Return the time to generate the remaining tokens, s; 0 before the first measurement."""
        times = [worker.decode_step_s for worker in self._workers if worker.costs.is_measured]
        step_s = sum(times) / len(times) if times else 0.0
        return step_s * max(0.0, self.output_tokens(request) - request.num_generated)

    def must_start(self, request: Request) -> float | None:
        """Return the latest start at which the request completes by the client's deadline; None without one.

        A safety factor applies, because a request that is given up after its first token has taken service from others.
        """
        if request.deadline is None:
            return None
        decode_s = 0.0 if self._expected_tokens(request) is None else self.decode_s(request)
        return request.deadline - _CAUTION * (self.prefill_s(request) + decode_s)

    def latest_start(self, request: Request) -> float | None:
        """Return the latest start that meets the request's deadline and targets; None without any."""
        starts = []
        if request.ttft_deadline is not None and not request.num_generated:
            starts.append(request.ttft_deadline - self.prefill_s(request))
        if request.total_deadline is not None:
            starts.append(request.total_deadline - self.prefill_s(request) - self.decode_s(request))
        return min(starts, default=None)

    def _expected_tokens(self, request: Request) -> float | None:
        """Return the hint, or what finished requests of the same kind have generated; None without both."""
        if request.spec.expected_output_tokens:
            return request.spec.expected_output_tokens
        return self._learned_tokens(request)

    def _learned_tokens(self, request: Request) -> float | None:
        """Return what finished requests of the same kind have generated; None before the first one."""
        return next((self._lengths[key].value for key in _keys(request) if key in self._lengths), None)


def _keys(request: Request) -> tuple[tuple[str, int], ...]:
    return (request.spec.tenant, request.spec.num_prompt_tokens.bit_length()), (request.spec.tenant, -1), ("", -1)
