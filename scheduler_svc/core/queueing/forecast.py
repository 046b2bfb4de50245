"""Forecast of a request's cost: output length, prefill time and decode time, learned from measurements.

Output lengths are learned per tenant and power-of-two bucket of the prompt's length. Without data they fall back to the
tenant's mean, then to the mean of all tenants. Speeds are smoothed means over all workers.

Before the first measurement, forecasts are None or the request's own limit. A limit is no forecast of a length, because
most clients set none and may then generate the rest of the context. So no request is rejected for its limit.
"""

from dataclasses import dataclass

from scheduler_svc.core.requests.request import Request

_SMOOTHING = 0.1
_CAUTION = 1.25
"""Safety factor on the forecast duration of a request."""
_LEAST_FIXED = 0.1
"""Minimum share of a step's time that counts as independent of the number of rows."""
_MAX_KEYS = 10_000
"""Maximum number of remembered tenants and buckets; beyond that, learning starts again."""


@dataclass(slots=True)
class _Mean:
    value: float

    def add(self, sample: float) -> None:
        self.value += _SMOOTHING * (sample - self.value)


class Forecast:
    """Running averages of step times and of lengths, learned from finished steps and requests; times in s."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, int], _Mean] = {}
        self._decode_step: _Mean | None = None
        self._prefill_token: _Mean | None = None

    def step_measured(self, num_tokens: int, num_prefill_tokens: int, duration: float) -> None:
        """Record the duration of a step, seconds; of a decode step, per token of a row."""
        if not num_tokens:
            return
        if num_prefill_tokens * 2 > num_tokens:
            self._prefill_token = _updated(self._prefill_token, duration / num_tokens)
        elif not num_prefill_tokens:
            self._decode_step = _updated(self._decode_step, duration)

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

    def prefill_token_s(self) -> float:
        """Return the time to compute one prompt token, s; 0 before the first measurement."""
        return self._prefill_token.value if self._prefill_token is not None else 0.0

    def prefill_s(self, request: Request) -> float:
        """Return the time to compute the request's known tokens, s."""
        return self.prefill_token_s() * len(request.tokens)

    def recompute_steps(self, num_tokens: int, num_running: int) -> float:
        """Return the cost of computing `num_tokens` tokens again, in steps of one row.

        Part of a step's time does not depend on the number of rows. Only this part is lost when a row stays empty for
        a step, so it is the unit of the cost. Before the first measurement, a preemption costs one step.

        Args:
            num_tokens: tokens of the preempted request.
            num_running: rows of a step.
        """
        step = self._decode_step.value if self._decode_step is not None else 0.0
        token = self.prefill_token_s()
        if not step or not token:
            return 1.0
        return num_tokens * token / max(step - num_running * token, _LEAST_FIXED * step)

    def decode_s(self, request: Request) -> float:
        """Return the time to generate the remaining tokens, s."""
        if self._decode_step is None:
            return 0.0
        return self._decode_step.value * max(0.0, self.output_tokens(request) - request.num_generated)

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


def _updated(mean: _Mean | None, sample: float) -> _Mean:
    if mean is None:
        return _Mean(sample)
    mean.add(sample)
    return mean
