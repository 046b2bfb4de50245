"""A run's plan: all data for a generating process, as values that can be sent to it."""

from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from measure.load.arrivals import OpenLoop, Users
from measure.load.prompts import Prompts
from measure.load.workloads import TraitMix, Workload


@dataclass(frozen=True, slots=True)
class Address:
    """The server under load."""

    grpc: str = ""
    """gRPC target; empty for HTTP."""
    url: str = ""
    """Base URL for HTTP, without `/v1`."""
    model: str = ""
    tls_ca: str = ""
    """PEM file of the trusted CA; for gRPC, empty means no TLS."""
    connections: int = 1
    """Connections per process over gRPC. Over HTTP each request in flight has its own."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further body fields over HTTP."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    address: Address
    arrivals: OpenLoop | Users
    workload: Workload
    traits: TraitMix = field(default_factory=TraitMix)
    prompts: Prompts = field(default_factory=Prompts)
    max_model_len: int | None = None
    """Maximum number of prompt and output tokens together; None if the server does not report one."""
    seed: int = 0
    warmup_s: float = 0.0
    """Sessions that begin earlier are not counted."""
    duration_s: float | None = None
    """Time after the warm-up during which sessions begin; None for no limit."""
    sessions: int | None = None
    """Number of counted sessions; None for no limit."""
    max_in_flight: int = 1024
    """Sessions in progress at once, over all processes. Further ones wait in the generator and count as late."""
    timeout_s: float | None = None
    """Deadline of a request, from sending."""
    drain_s: float = 60.0
    """Time limit for requests in progress after the last arrival. Later ones fail as `unfinished`."""
    stops_early: bool = True
    """End the arrivals of an open loop when the server is over-saturated."""
    temperature: float = 0.0
    ignore_eos: bool = True

    @property
    def end_s(self) -> float | None:
        """When arrivals end; None without a limit."""
        return None if self.duration_s is None else self.warmup_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of a run: the sessions whose number modulo the process count equals the process's index."""

    number: int = 0
    of: int = 1

    def part(self, count: int) -> int:
        """Return this share of a count. All shares add up to the count."""
        return count // self.of + (self.number < count % self.of)


BEGUN, ANSWERED, ENDED, FAILED, TOKENS, WIDTH = range(6)


class Counters:
    """Running totals of one process, in an array that processes may share."""

    def __init__(self, values: "MutableSequence[int]", share: Share) -> None:
        self._values = values
        self._first = share.number * WIDTH

    @staticmethod
    def size(processes: int) -> int:
        """Return the length of the array: one row per process, and the stop flag."""
        return processes * WIDTH + 1

    def add(self, kind: int, count: int = 1) -> None:
        """Increase one of this process's totals."""
        self._values[self._first + kind] += count

    def total(self, kind: int) -> int:
        """Return one of the totals over all processes."""
        return sum(self._values[kind : len(self._values) - 1 : WIDTH])

    @property
    def is_stopped(self) -> bool:
        """Whether no further session may begin."""
        return bool(self._values[len(self._values) - 1])

    def stop(self) -> None:
        """Prevent further sessions from beginning, in all processes."""
        self._values[len(self._values) - 1] = 1
