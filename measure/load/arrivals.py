"""Arrival processes: the times at which sessions of a benchmark begin. Pure and seeded.

In an open loop, sessions begin at times that do not depend on the server. It shows what happens to real traffic when
the server is slow. In a closed loop, each of a fixed number of users begins a session when the previous one has ended.
It shows what the server can do with a constant number of requests.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import numpy as np


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps between arrivals follow a gamma distribution. A burstiness of 1 gives Poisson arrivals."""

    rate: float
    """Arrivals per second."""
    burstiness: float = 1.0
    """Shape of the distribution, as in `vllm bench serve`.

    A smaller value is burstier; the CV of the gaps is 1 / √shape.
    """

    @classmethod
    def of_cv(cls, rate: float, cv: float) -> "Gamma":
        """Return the process whose gaps have this coefficient of variation."""
        return cls(rate, 1 / cv**2)

    def times(self, seed: int) -> Iterator[float]:
        """Yield the arrival times in seconds, in order, without end."""
        rng = np.random.default_rng(seed)
        now = 0.0
        while True:
            now += float(rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness)))
            yield now


@dataclass(frozen=True, slots=True)
class Constant:
    """Arrivals at equal intervals, beginning at 0."""

    rate: float
    """Arrivals per second."""

    def times(self, seed: int) -> Iterator[float]:
        """Yield the arrival times in seconds, in order, without end; the seed has no effect."""
        return (number / self.rate for number in count())


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson arrivals whose rate changes linearly and then stays constant."""

    first_rate: float
    last_rate: float
    """Arrivals per second at the beginning, and from `over_s` on."""
    over_s: float
    """Duration of the change, seconds."""

    def times(self, seed: int) -> Iterator[float]:
        """Yield the arrival times in seconds, in order, without end."""
        rng = np.random.default_rng(seed)
        arrivals = 0.0
        while True:
            arrivals += float(rng.exponential())
            yield self._time_of(arrivals)

    def _time_of(self, arrivals: float) -> float:
        """Return the time until which this many arrivals are expected."""
        during = (self.first_rate + self.last_rate) / 2 * self.over_s
        if arrivals >= during:
            return self.over_s + (arrivals - during) / self.last_rate
        slope = (self.last_rate - self.first_rate) / self.over_s
        # The positive root of slope/2 t² + first_rate t = arrivals, in a form that also works for slope 0.
        return 2 * arrivals / (self.first_rate + math.sqrt(self.first_rate**2 + 2 * slope * arrivals))


@dataclass(frozen=True, slots=True)
class Replay:
    """The arrival times of a trace."""

    recorded_s: tuple[float, ...]
    """Times in seconds, in order, from any origin."""
    speed: float = 1.0
    """Factor by which the replay is faster than the recording."""

    def times(self, seed: int) -> Iterator[float]:
        """Yield the arrival times in seconds since the first one; the seed has no effect."""
        return ((each - self.recorded_s[0]) / self.speed for each in self.recorded_s)


OpenLoop: TypeAlias = Gamma | Constant | Ramp | Replay


@dataclass(frozen=True, slots=True)
class Users:
    """Closed loop: each user waits for a response, thinks, then sends the next request."""

    count: int
    think_s: float = 0.0
    """Time from the end of a session to the same user's next one, seconds."""
