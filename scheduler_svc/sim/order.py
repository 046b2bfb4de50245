"""Who waits, and that nobody is overtaken beyond what the core states.

A policy is an order by a key (see `core.waiting`). The simulator knows each key, or two bounds of it where it depends
on what the core has learned. A request is *overtaken* when one with a larger key is admitted while it waits: it did not
fit then. The core promises that this happens at most `MAX_OVERTAKEN` times in one wait. So both are checked at once:
without an advantage in its key nobody goes first (ageing), except for the bounded number of smaller ones.

Not checked: `lpm`, whose order depends on the cache, and across tenants under `fair` or across request classes.
"""

import bisect
import math

from scheduler_svc.core.admission import MAX_LEFT_ELSEWHERE, MAX_OVERTAKEN
from scheduler_svc.core.waiting import AGEING_S, EDF_SLACK_S, SJF_S_PER_TOKEN
from scheduler_svc.sim.coverage import Limit
from scheduler_svc.sim.stream import Stream
from scheduler_svc.sim.world import World


class WaitingRoom:
    """The streams that the core has in its queue, in the order of the largest key that each can have."""

    def __init__(self, world: World) -> None:
        self._world = world
        config = world.scenario.config
        self._policy = "classes" if config.classes else config.policy
        self._bound = MAX_OVERTAKEN
        if len(world.scenario.workers) > 1:
            # While it is left to another worker, a plan may pass it by with as many requests as there are rows.
            self._bound += MAX_LEFT_ELSEWHERE * config.max_num_seqs
        self._arrivals = 0
        self._sequence: dict[Stream, int] = {}
        self._queues: dict[str, list[tuple[float, int, Stream]]] = {}
        self._entries: dict[Stream, tuple[float, int, Stream]] = {}
        self._overtaken: dict[Stream, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._entries

    def knows(self, stream: Stream) -> bool:
        """Whether the stream has arrived and not ended."""
        return stream in self._sequence

    def streams(self) -> list[Stream]:
        """Everybody who waits."""
        return list(self._entries)

    def arrive(self, stream: Stream) -> None:
        """A stream is new to the core."""
        self._arrivals += 1
        self._sequence[stream] = self._arrivals

    def wait(self, stream: Stream) -> None:
        """A stream is put into the queue; its count of those who overtake it begins anew."""
        self.leave(stream)
        entry = (self._largest_key(stream), self._sequence[stream], stream)
        self._entries[stream] = entry
        self._overtaken[stream] = 0
        bisect.insort(self._queue_of(stream), entry)

    def leave(self, stream: Stream) -> None:
        """A stream is in the queue no more."""
        entry = self._entries.pop(stream, None)
        if entry is not None:
            queue = self._queue_of(stream)
            del queue[bisect.bisect_left(queue, entry)]

    def forget(self, stream: Stream) -> None:
        """A stream has ended."""
        self.leave(stream)
        self._sequence.pop(stream, None)
        self._overtaken.pop(stream, None)

    def admit(self, stream: Stream) -> None:
        """A stream is given a row."""
        key = self._smallest_key(stream), self._sequence[stream]
        self.leave(stream)
        for largest, sequence, other in self._queue_of(stream):
            if (largest, sequence) >= key:
                break
            if other.starved or other.demand.grammar:
                continue  # the latter may have waited for this worker to compile
            count = self._overtaken[other] = self._overtaken[other] + 1
            self._world.coverage.limit(Limit.OVERTAKEN)
            if count == MAX_OVERTAKEN:
                self._world.coverage.limit(Limit.OVERTAKEN_MOST)
            if count > self._bound:
                what = f"overtaken {count} times, last by {stream.name}"
                self._world.broken("order.overtaken", what, other.name)

    def _queue_of(self, stream: Stream) -> list[tuple[float, int, Stream]]:
        return self._queues.setdefault(stream.demand.tenant if self._policy == "fair" else "", [])

    def _largest_key(self, stream: Stream) -> float:
        demand = stream.demand
        match self._policy:
            case "fcfs" | "fair":
                return 0.0
            case "priority":
                return stream.arrival - demand.priority * AGEING_S
            case "sjf":
                forecast = min(demand.expected_output_tokens or demand.max_tokens, demand.max_tokens)
                return stream.arrival + SJF_S_PER_TOKEN * max(0, forecast - len(stream.tokens))
            case "edf":
                return min(self._wanted(stream), default=stream.arrival + EDF_SLACK_S)
        return math.inf

    def _smallest_key(self, stream: Stream) -> float:
        demand = stream.demand
        match self._policy:
            case "sjf":
                most = min(demand.max_tokens, stream.context - len(demand.prompt))
                forecast = min(demand.expected_output_tokens, most)
                return stream.arrival + SJF_S_PER_TOKEN * max(0, forecast - len(stream.tokens))
            case "edf":
                # A target that is met already may still count: keys are fixed when a request is queued.
                late = self._wanted(stream) or demand.ttft_s is not None
                return -math.inf if late else self._largest_key(stream)
            case "lpm" | "classes":
                return -math.inf
        return self._largest_key(stream)

    @staticmethod
    def _wanted(stream: Stream) -> list[float]:
        """Times that the stream should meet; the core's key is earlier by what it forecasts."""
        times = [stream.deadline, stream.total_deadline, None if stream.tokens else stream.ttft_deadline]
        return [time for time in times if time is not None]
