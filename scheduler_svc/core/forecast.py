"""What a request will probably cost: output length, prefill and decode time, learned from what was measured.

Output lengths are learned per tenant and power-of-two bucket of the prompt's length, falling back to the tenant and
then to everyone; speeds are smoothed means over all workers. Before anything was measured, forecasts are None or the
request's own limit: nobody is rejected on a guess.
"""

from dataclasses import dataclass

from scheduler_svc.core.request import Request

_SMOOTHING = 0.1
_CAUTION = 1.25
"""By how much longer than forecast a request may take."""
_MAX_KEYS = 10_000
"""Tenants and buckets remembered; when there are more, learning starts anew."""


@dataclass(slots=True)
class _Mean:
    value: float

    def add(self, sample: float) -> None:
        self.value += _SMOOTHING * (sample - self.value)


class Forecast:
    """Learns from steps and ends; all times in seconds."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, int], _Mean] = {}
        self._decode_step: _Mean | None = None
        self._prefill_token: _Mean | None = None

    def step_measured(self, num_tokens: int, num_prefill_tokens: int, duration: float) -> None:
        """A step took `duration`."""
        if not num_tokens:
            return
        if num_prefill_tokens * 2 > num_tokens:
            self._prefill_token = _updated(self._prefill_token, duration / num_tokens)
        elif not num_prefill_tokens:
            self._decode_step = _updated(self._decode_step, duration)

    def request_finished(self, request: Request) -> None:
        """A request came to its natural end."""
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
        """How many tokens the request will probably generate in all."""
        if request.pooling:
            return 0.0
        most = request.limit - request.num_prompt_tokens
        if request.expected_output_tokens:
            return min(request.expected_output_tokens, most)
        for key in _keys(request):
            mean = self._lengths.get(key)
            if mean is not None:
                return min(mean.value, most)
        return most

    def prefill_token_s(self) -> float:
        """Time to compute one prompt token; 0 before anything was measured."""
        return self._prefill_token.value if self._prefill_token is not None else 0.0

    def prefill_s(self, request: Request) -> float:
        """Time to compute the request's known tokens."""
        return self.prefill_token_s() * len(request.tokens)

    def decode_s(self, request: Request) -> float:
        """Time to generate what is still to come."""
        if self._decode_step is None:
            return 0.0
        return self._decode_step.value * max(0.0, self.output_tokens(request) - request.num_generated)

    def must_start(self, request: Request) -> float | None:
        """When the request must run at the latest to be complete by the client's deadline; None without one.

        With some to spare: a request that is given up after its first token has cost others what it has had.
        """
        if request.deadline is None:
            return None
        return request.deadline - _CAUTION * (self.prefill_s(request) + self.decode_s(request))

    def latest_start(self, request: Request) -> float | None:
        """When the request must run at the latest to meet its deadline and targets; None without any."""
        starts = []
        if request.ttft_deadline is not None and not request.num_generated:
            starts.append(request.ttft_deadline - self.prefill_s(request))
        if request.total_deadline is not None:
            starts.append(request.total_deadline - self.prefill_s(request) - self.decode_s(request))
        return min(starts, default=None)


def _keys(request: Request) -> tuple[tuple[str, int], ...]:
    return (request.tenant, request.num_prompt_tokens.bit_length()), (request.tenant, -1), ("", -1)


def _updated(mean: _Mean | None, sample: float) -> _Mean:
    if mean is None:
        return _Mean(sample)
    mean.add(sample)
    return mean
