"""Kinds of workers, which determine the requests that a worker can serve.

A request runs on a worker whose context fits its whole length, if there is one. Otherwise it runs on a worker with the
longest context, if at least one more token fits. When this context is full, the request leaves the worker and continues
as soon as a worker with a longer context is available. No response is therefore truncated because its worker's context
is shorter than another worker's.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from scheduler_svc.core.requests.request import Request

LONGEST = 0
"""Stands for the longest available context, in the scope of requests that are too long for every worker."""


class Demand(NamedTuple):
    """Requirements of a request other than its length."""

    embeds: bool
    model: str
    """Model fingerprint; "" for any."""


class Kind(NamedTuple):
    """A worker's kind: the properties that decide which requests it can serve."""

    max_model_len: int
    embeds: bool
    model: str
    """Fingerprint of the model."""

    def meets(self, demand: Demand) -> bool:
        return (self.embeds or not demand.embeds) and demand.model in ("", self.model)

    def holds(self, request: Request) -> bool:
        """Return whether a worker of this kind can compute at least one more token of the request."""
        return len(request.tokens) < self.max_model_len and self.meets(_demand(request))


class Scope(NamedTuple):
    """Identifies the workers that can serve a request, if not all can, by demand and context length."""

    demand: Demand
    min_model_len: int


class Kinds:
    """The kinds of the workers that take requests."""

    def __init__(self, kinds: Iterable[Kind] = ()) -> None:
        self.all = set(kinds)
        self._lengths: dict[Demand, list[int]] = {}
        """By demand, the context lengths of the kinds that meet it, ascending."""
        self._shortest = min((kind.max_model_len for kind in self.all), default=0)
        for model in {"", *(kind.model for kind in self.all)}:
            for embeds in (False, True):
                demand = Demand(embeds, model)
                lengths = sorted({kind.max_model_len for kind in self.all if kind.meets(demand)})
                if lengths:
                    self._lengths[demand] = lengths
        self._met_by_all: set[tuple[bool, str]] = {
            demand for demand in self._lengths if all(kind.meets(demand) for kind in self.all)
        }

    def serve(self, request: Request) -> bool:
        """Return whether a worker of one of these kinds serves the request."""
        return self._min_model_len(request, _demand(request)) is not None

    def serves(self, kind: Kind, request: Request) -> bool:
        """Return whether workers of this kind serve the request."""
        if self._is_served_by_all(request):
            spec = request.spec
            embeds = kind.embeds or not spec.pooling
            return embeds and kind.max_model_len >= self._shortest and spec.model in ("", kind.model)
        demand = _demand(request)
        length = self._min_model_len(request, demand)
        return length is not None and self.contains(Scope(demand, length), kind)

    def scope(self, request: Request) -> Scope | None:
        """Return the request's scope; None if all workers or no worker can serve it."""
        if self._is_served_by_all(request):
            return None
        demand = _demand(request)
        length = self._min_model_len(request, demand)
        if length is None or (len(self.all) == 1 and demand in self._met_by_all):
            return None
        return Scope(demand, length)

    def contains(self, scope: Scope, kind: Kind) -> bool:
        """Return whether workers of this kind belong to a scope."""
        length = scope.min_model_len
        if length == LONGEST:
            length = self._lengths[scope.demand][-1]
        return kind.max_model_len >= length and kind.meets(scope.demand)

    def longest(self, request: Request) -> int:
        """Return the longest context among the workers that meet the request's demand; 0 if there are none."""
        return self._lengths.get(_demand(request), (0,))[-1]

    def _is_served_by_all(self, request: Request) -> bool:
        spec = request.spec
        # A tuple equals the `Demand` with the same values, and is faster to make.
        return request.limit <= self._shortest and (bool(spec.pooling), spec.model) in self._met_by_all

    def _min_model_len(self, request: Request, demand: Demand) -> int | None:
        """Return the shortest context among the workers that can serve the request; None if no worker can."""
        lengths = self._lengths.get(demand)
        if lengths is None:
            return None
        if request.limit > lengths[-1]:
            return LONGEST if lengths[-1] > len(request.tokens) else None
        return lengths[bisect_left(lengths, request.limit)]


_PLAIN = Demand(embeds=False, model="")


def _demand(request: Request) -> Demand:
    spec = request.spec
    return Demand(embeds=bool(spec.pooling), model=spec.model) if spec.pooling or spec.model else _PLAIN
