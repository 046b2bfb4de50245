"""Rates, TTFT, ITL and goodput between two times, for live views."""

from dataclasses import dataclass

import numpy as np

from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface.records import EndReason, Peer

_SERVED = frozenset({EndReason.STOP, EndReason.STOP_STRING, EndReason.LENGTH, EndReason.EMBEDDED})
_MAX_SAMPLES = 4096
"""Maximum number of samples per interval. Further samples are not included in the quantiles."""

Key = tuple[Peer, int]


@dataclass(slots=True)
class _Live:
    arrival: float
    ttft_deadline: float | None
    total_deadline: float | None
    is_late: bool = False


class Served:
    """Service metrics since the last call of `take`. All times are on the core's clock, in seconds."""

    def __init__(self) -> None:
        self._live: dict[Key, _Live] = {}
        """Requests that arrived since this object was made."""
        self._since: float | None = None
        self._rates = admin.ServiceRates()
        self._ttft: list[float] = []
        self._itl: list[tuple[float, int]] = []

    def arrived(self, key: Key, now: float, ttft_deadline: float | None, total_deadline: float | None) -> None:
        """Count an arrival."""
        self._rates.arrived_requests += 1
        self._live[key] = _Live(now, ttft_deadline, total_deadline)

    def admitted(self, num_cached: int) -> None:
        """Count the first admission of a request with so many cached prompt tokens."""
        self._rates.cached_prompt_tokens += num_cached

    def first_token(self, key: Key, now: float) -> None:
        """Count a first token."""
        live = self._live.get(key)
        if live is None:
            return
        live.is_late = live.ttft_deadline is not None and now > live.ttft_deadline
        if len(self._ttft) < _MAX_SAMPLES:
            self._ttft.append(now - live.arrival)

    def ended(self, key: Key, reason: EndReason, now: float) -> None:
        """Count an end."""
        live = self._live.pop(key, None)
        if reason not in _SERVED:
            return
        self._rates.completed_requests += 1
        has_target = live is not None and (live.ttft_deadline is not None or live.total_deadline is not None)
        self._rates.targeted_requests += has_target
        is_late = live is not None and (live.is_late or (live.total_deadline is not None and now > live.total_deadline))
        self._rates.good_requests += not is_late

    def step(self, *, num_prompt: int, num_outputs: int, num_again: int, gap_s: float) -> None:
        """Count a step.

        Args:
            num_prompt: tokens of prompts that it computed.
            num_outputs: tokens that it generated.
            num_again: number of these tokens that were not their requests' first tokens.
            gap_s: time since the worker's previous step ended; 0 without one.
        """
        self._rates.prompt_tokens += num_prompt
        self._rates.output_tokens += num_outputs
        if num_again and gap_s > 0 and len(self._itl) < _MAX_SAMPLES:
            self._itl.append((gap_s, num_again))

    def take(self, now: float) -> admin.ServiceRates:
        """Return the numbers since the last call."""
        rates, self._rates = self._rates, admin.ServiceRates()
        rates.seconds = 0.0 if self._since is None else max(0.0, now - self._since)
        self._since = now
        rates.ttft.CopyFrom(_quantiles([(each, 1) for each in self._ttft]))
        rates.itl.CopyFrom(_quantiles(self._itl))
        self._ttft, self._itl = [], []
        return rates


def _quantiles(samples: list[tuple[float, int]]) -> admin.Quantiles:
    """Return the quantiles of samples with weights."""
    if not samples:
        return admin.Quantiles()
    values = np.array([value for value, _ in samples])
    order = np.argsort(values)
    sums = np.cumsum(np.array([weight for _, weight in samples])[order])
    p50, p99 = (values[order[np.searchsorted(sums, share * sums[-1])]].item() for share in (0.5, 0.99))
    return admin.Quantiles(count=sums[-1].item(), p50=p50, p99=p99)
