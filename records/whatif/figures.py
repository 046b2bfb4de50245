"""Computes the results of a run: throughput, latencies, occupancy.

The same code is used for a record and for a simulation, so that the two can be compared. All times are measured at the
scheduler: a request begins when it arrives there, and a token counts when the result of its step arrives.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.interface.records import EndReason

Numbers = npt.NDArray[np.int64]
_SHORTEST_S = 1e-6
_GROWTH = 1.005
"""Ratio of adjacent histogram bounds; limits a quantile's error to half a percent."""
_NUM_BINS = 5000
"""Enough for gaps of up to 60,000 s."""
NATURAL_ENDS = frozenset({EndReason.STOP, EndReason.STOP_STRING, EndReason.LENGTH, EndReason.EMBEDDED})
"""End reasons of requests that were served completely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Distribution of one kind of latency, in seconds; all values are 0 without samples."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Results of one run."""

    requests: int
    """Requests that were served completely."""
    others: dict[str, int]
    """Requests that ended otherwise, by reason."""
    good: int = 0
    """Requests that were served completely and met their own targets, if any."""
    targeted: int = 0
    """Requests that were served completely and had targets."""
    duration_s: float
    """From the first arrival to the last end."""
    requests_per_s: float
    output_tokens_per_s: float
    ttft: Latency
    """From the arrival to the first token."""
    itl: Latency
    """Between two consecutive steps that generate tokens for a request; with drafts, a step may generate several."""
    e2e: Latency
    """From the arrival to the end, for requests that were served completely."""
    steps: int
    rows_per_step: float
    """Mean number of rows that compute in a step."""
    busy_share: float
    """Share of time during which a worker computes, averaged over the workers."""
    preemptions: int
    prefix_hit_rate: float
    """Share of prompt tokens that were in the prefix cache."""
    draft_tokens: int
    """Number of verified drafts."""
    accepted_draft_tokens: int
    """Number of accepted drafts."""


class Timeline:
    """Collects a run's request events. Requests are numbered from 0 in arrival order."""

    def __init__(self) -> None:
        self._arrived = np.zeros(64)
        self._first = np.zeros(64)
        self._last = np.zeros(64)
        """By request: time of the newest token; 0 if there is none."""
        self._num_prompt = np.zeros(64, np.int64)
        self._live = np.zeros(64, np.bool_)
        self._left_out = np.zeros(64, np.bool_)
        self._gaps = np.zeros(_NUM_BINS, np.int64)
        self._gap_sum = 0.0
        self._e2e: list[float] = []
        self._targets: dict[int, tuple[float, float]] = {}
        """For each request with targets, when its first and its last token are due."""
        self._num_late = self._num_targeted = 0
        self._others: Counter[str] = Counter()
        self._num_ended = self._num_outputs = self._num_cached = self._num_prompts = self._preemptions = 0
        self._begin = self._end = 0.0
        self._steps = self._rows = self._drafts = self._accepted = 0
        self._busy_s = 0.0
        self.num_requests = 0

    def arrived(
        self,
        at: float,
        num_prompt: int,
        *,
        left_out: bool = False,
        first_by: float | None = None,
        last_by: float | None = None,
    ) -> int:
        """Record an arrival; return the request's number.

        Args:
            at: the time, s.
            num_prompt: tokens of the prompt.
            left_out: whether to exclude the request from the results, for example because it arrived before the
                record began.
            first_by: time by which the first token is wanted; None if there is no such target.
            last_by: when the last token is due; None for no target.
        """
        number = self.num_requests
        self.num_requests += 1
        if number == len(self._live):
            for name in ("_arrived", "_first", "_last", "_num_prompt", "_live", "_left_out"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._arrived[number] = at
        self._num_prompt[number] = num_prompt
        self._live[number] = True
        self._left_out[number] = left_out
        if first_by is not None or last_by is not None:
            never = float("inf")
            self._targets[number] = never if first_by is None else first_by, never if last_by is None else last_by
        if not left_out:
            self._begin = self._begin or at
        return number

    def tokens(self, numbers: Numbers, at: float) -> None:
        """Record that requests got tokens; ignore ended requests."""
        numbers = numbers[self._live[numbers]]
        last = self._last[numbers]
        is_first = last == 0
        self._first[numbers[is_first]] = at
        self._last[numbers] = at
        counted = ~(is_first | self._left_out[numbers])
        gaps = at - last[counted]
        if len(gaps):
            self._gap_sum += float(gaps.sum())
            np.add.at(self._gaps, _bins(gaps), 1)

    def ended(self, number: int, at: float, reason: EndReason, *, outputs: int, cached: int, preemptions: int) -> None:
        """Record an end."""
        self._live[number] = False
        targets = self._targets.pop(number, None)
        if self._left_out[number]:
            return
        self._end = max(self._end, at)
        self._num_outputs += outputs
        self._preemptions += preemptions
        if self._last[number] or reason in NATURAL_ENDS:
            self._num_cached += cached
            self._num_prompts += int(self._num_prompt[number])
        if reason in NATURAL_ENDS:
            self._num_ended += 1
            self._e2e.append(at - float(self._arrived[number]))
            if targets is not None:
                self._num_targeted += 1
                self._num_late += self._first[number] > targets[0] or at > targets[1]
        else:
            self._others[reason.value] += 1

    def step(self, num_rows: int, seconds: float, *, drafts: int = 0, accepted: int = 0) -> None:
        """Record a completed step, which took `seconds` on a worker; `accepted` of its `drafts` were accepted."""
        self._steps += 1
        self._drafts += drafts
        self._accepted += accepted
        self._rows += num_rows
        self._busy_s += seconds

    def is_live(self, number: int) -> bool:
        """Return whether the request has not ended."""
        return bool(self._live[number])

    def age(self, number: int, at: float) -> float:
        """Return how long ago the request arrived, s."""
        return at - float(self._arrived[number])

    def figures(self, num_workers: int) -> Figures:
        """Return the results of the run so far.

        Args:
            num_workers: number of workers, by which the busy time is divided.
        """
        count = self.num_requests
        shown = (self._first[:count] > 0) & ~self._left_out[:count]
        ttft = self._first[:count][shown] - self._arrived[:count][shown]
        duration = max(self._end - self._begin, 1e-9)
        return Figures(
            requests=self._num_ended,
            others=dict(sorted(self._others.items())),
            good=self._num_ended - int(self._num_late),
            targeted=self._num_targeted,
            duration_s=duration,
            requests_per_s=self._num_ended / duration,
            output_tokens_per_s=self._num_outputs / duration,
            ttft=latency(ttft.tolist()),
            itl=_of_histogram(self._gaps, self._gap_sum),
            e2e=latency(self._e2e),
            steps=self._steps,
            rows_per_step=self._rows / max(1, self._steps),
            busy_share=min(1.0, self._busy_s / duration / max(1, num_workers)),
            preemptions=self._preemptions,
            prefix_hit_rate=self._num_cached / max(1, self._num_prompts),
            draft_tokens=self._drafts,
            accepted_draft_tokens=self._accepted,
        )


def latency(samples: Iterable[float]) -> Latency:
    """Return the distribution of samples, which are in seconds."""
    values = np.fromiter(samples, np.float64)
    if not len(values):
        return Latency()
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Latency(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def _bins(values: npt.NDArray[np.float64]) -> Numbers:
    logs = np.log(np.maximum(values, _SHORTEST_S) / _SHORTEST_S) / np.log(_GROWTH)
    found: Numbers = np.minimum(logs.astype(np.int64), _NUM_BINS - 1)
    return found


def _of_histogram(counts: Numbers, total: float) -> Latency:
    number = int(counts.sum())
    if not number:
        return Latency()
    sums = np.cumsum(counts)

    def quantile(share: float) -> float:
        at = int(np.searchsorted(sums, share * (number - 1), side="right"))
        return float(_SHORTEST_S * _GROWTH ** (at + 0.5))

    return Latency(mean=total / number, p50=quantile(0.5), p90=quantile(0.9), p99=quantile(0.99))
