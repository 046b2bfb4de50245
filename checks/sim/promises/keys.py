"""Bounds of the keys by which policies order requests.

A policy orders requests by a key (see `core.queueing.policies`). The simulator knows each key, or two bounds if the key
depends on what the core has learned.
"""

import math

from checks.sim.promises.base import Promise
from checks.sim.stream import Stream
from scheduler_svc.core.queueing.policies import AGEING_S, EDF_SLACK_S, SJF_S_PER_TOKEN
from shared.request_spec import Pooling


class PolicyKeys(Promise):
    """Bounds on the keys by which policies order requests. This class guarantees nothing itself."""

    def queue(self, stream: Stream) -> tuple[str, str]:
        """Return a stream's queue: its class's, or its tenant's under `fair`."""
        name = stream.demand.tenant if stream.demand.tenant in self.config.classes else ""
        return name, stream.demand.tenant if self._policy(stream) == "fair" else ""

    def largest(self, stream: Stream) -> float:
        demand = stream.demand
        match self._policy(stream):
            case "priority":
                return stream.arrival - demand.priority * AGEING_S
            case "sjf":
                forecast = min(demand.expected_output_tokens or demand.max_tokens, demand.max_tokens)
                return stream.arrival + self._length_penalty(stream, forecast)
            case "edf":
                # A request that has missed its target ranks behind those that can still meet theirs.
                wanted = [stream.deadline, stream.total_deadline, stream.ttft_deadline]
                has_target = any(time is not None for time in wanted)
                return math.inf if has_target else stream.arrival + EDF_SLACK_S
            case "lpm" | "fair" | "slo":
                return math.inf
        return stream.arrival

    def smallest(self, stream: Stream) -> float:
        demand = stream.demand
        match self._policy(stream):
            case "sjf":
                most = min(demand.max_tokens, stream.context - len(demand.prompt))
                return stream.arrival + self._length_penalty(stream, min(demand.expected_output_tokens, most))
            case "edf":
                # A target that is already met may still count, because keys are fixed when a request is queued.
                wanted = [stream.deadline, stream.total_deadline, stream.ttft_deadline]
                soonest = min((time for time in wanted if time is not None), default=None)
                if soonest is None:
                    return stream.arrival + EDF_SLACK_S
                steps = len(demand.prompt) + demand.max_tokens
                return min(soonest - steps * self.cluster.longest_step, stream.arrival + EDF_SLACK_S)
            case "lpm" | "fair" | "slo":
                return -math.inf
        return self.largest(stream)

    @staticmethod
    def _length_penalty(stream: Stream, forecast: float) -> float:
        generates = stream.demand.pooling is Pooling.NONE
        return SJF_S_PER_TOKEN * max(0, forecast - len(stream.tokens)) if generates else 0.0

    def _policy(self, stream: Stream) -> str:
        return self.config.policy_of(stream.demand.tenant)
