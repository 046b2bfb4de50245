"""Coverage of a simulation: how often each kind of event, effect, fault, policy and limit occurred."""

import enum
from collections import Counter

from checks.sim.faults import Fault
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import (
    BATCHING_MODES,
    CAPACITY_MODES,
    POLICIES,
    PREFIX_CACHES,
    VICTIM_RULES,
    CoreConfig,
)

Kind = tuple[str, str]


class Limit(enum.Enum):
    """Limits and rare conditions that a campaign must reach."""

    ROWS = "max_num_seqs reached"
    TOKENS = "max_num_batched_tokens reached"
    CHUNK = "long_prefill_token_threshold reached"
    ATTENTION = "a token of a prompt whose attention costs more than the budget left"
    TARGET = "a prompt gets a shorter chunk because of the step's target"
    QUEUE = "queue full"
    REFUSED = "refused by a forecast in a world without faults"
    IN_FLIGHT = "max_plans_in_flight reached"
    MEMORY = "preempted"
    URGENT = "preempted for an urgent request"
    SWAPPED_OUT = "swapped out"
    SWAPPED_IN = "swapped in"
    MOVED_OUT = "cached blocks moved to host memory"
    TAKEN_AFTER_COPY = "a cached block copied to host memory and taken by the same plan"
    MOVED_BACK = "cached blocks copied back from host memory"
    DISK_WRITTEN = "a block written to disk"
    DISK_READ = "a block read from disk"
    DISK_LISTED = "a worker lists blocks on disk from before"
    DISK_FAILED = "a block not written or read"
    COPIES_OVERLAP = "copies between device and host that overlap with a step"
    MOVED_BACK_IN_PARTS = "a request waits for the rest of its prefix in host memory"
    CREDIT = "held out for credit"
    SESSION = "a new session waits for memory"
    CONTEXT = "context full"
    OVERTAKEN = "overtaken"
    OVERTAKEN_MOST = "overtaken up to the bound"
    SHARED = "prefix found in the cache"
    FOUND_AFTER_EVICTION = "prefix found after others were evicted"
    RETAINED = "retained prefix found after others were evicted"
    RETENTION_ENDED = "prefix found after its retention has ended"
    COPIED = "part of a block copied"
    RESTORED = "recurrent state restored from a checkpoint"
    STATE_KEPT = "state of a checkpoint copied to host memory"
    REPLACED_STATE_KEPT = "state copied to host memory by the plan that writes its checkpoint again"
    STATE_FOUND_ON_HOST = "row begins with the state of a cached prefix in host memory"
    INNOCENT = "row failed by another row's spoilt prefix"
    MODEL = "model changed"
    BUCKET = "a request starts under a token rate"
    CONDEMNED = "condemned"
    ACQUITTED = "a suspect runs with others again"
    MOVED = "moved by a drain"
    STAYED = "left where it is by a drain"
    SHARES = "service of two groups that wait differs by a quarter of its bound"
    IDLE = "idle worker checked for work it could do"
    IDLE_WITH_WAITING = "idle worker, and requests wait that all do not fit"


def expected_kinds() -> list[Kind]:
    """Return every kind that a campaign must see at least once."""
    return [
        *(("event", kind.__name__) for kind in ev.Event.__args__),
        *(("effect", kind.__name__) for kind in ef.Effect.__args__),
        *(("end", reason.name) for reason in ef.EndReason),
        *(("fault", fault.name) for fault in Fault),
        *(("limit", limit.name) for limit in Limit),
        *(("policy", policy) for policy in POLICIES),
        *(("capacity", mode) for mode in CAPACITY_MODES),
        *(("batching", mode) for mode in BATCHING_MODES),
        *(("victims", rule) for rule in VICTIM_RULES),
        *(("prefix cache", kind) for kind in PREFIX_CACHES),
    ]


class Coverage:
    """Counts by kind."""

    def __init__(self) -> None:
        self.counts: Counter[Kind] = Counter()

    def limit(self, limit: Limit) -> None:
        """Count a limit that was reached."""
        self.counts["limit", limit.name] += 1

    def fault(self, fault: Fault) -> None:
        """Count a fault that was injected."""
        self.counts["fault", fault.name] += 1

    def scenario(self, config: CoreConfig) -> None:
        """Count a simulation with this configuration."""
        self.counts["policy", config.policy] += 1
        self.counts["capacity", config.capacity] += 1
        self.counts["batching", config.batching.mode] += 1
        self.counts["victims", config.victim_rule] += 1
        self.counts["prefix cache", config.prefix_cache] += 1

    def missing(self) -> list[Kind]:
        """Return the kinds that were not seen."""
        return [kind for kind in expected_kinds() if not self.counts[kind]]

    def table(self) -> str:
        """Return one line per group: `group  kind count, kind count, …`."""
        groups: dict[str, list[str]] = {}
        for kind in [*expected_kinds(), *sorted(set(self.counts) - set(expected_kinds()))]:
            group, name = kind
            groups.setdefault(group, []).append(f"{name} {self.counts[kind]}")
        width = max(map(len, groups))
        return "\n".join(f"{group:<{width}}  {', '.join(entries)}" for group, entries in groups.items())
