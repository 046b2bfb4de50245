"""Present limit: the current bottleneck of the service in one sentence, with the remedy and the waiting requests.

The module is a pure function of the core's pressure. Like request explanations, it reads the reason that the planner
noted for each worker, and uses the same remedies.

The majority of waiting requests determines the limit. For example, if more requests wait for their tenant's limit than
for a row, the tenant's limit is reported.
"""

import enum
from collections import Counter
from dataclasses import dataclass

from scheduler_svc import remedies
from scheduler_svc.core.interface.records import WaitReason
from scheduler_svc.core.lifecycle.pressure import Pressure, WorkerPressure

_MUCH_MEMORY = 0.8
"""Fraction of the KV memory above which more rows would soon lack memory."""
_SAFE_MEMORY = 0.9
"""Fraction of the KV memory that an estimate of possible rows may fill."""


class LimitKind(enum.Enum):
    """Present limit of the service."""

    IDLE = "idle"
    """No request is live."""
    NO_WORKER = "no worker"
    DRAINING = "draining"
    ROWS = "rows"
    MEMORY = "memory"
    PROMPTS = "prompt compute"
    DECODE = "decode bandwidth"
    CREDIT = "readers"
    TENANT = "tenant limit"
    SESSION = "session memory"
    GRAMMAR = "grammar"
    PREFIX = "prefix"
    BATCH = "batch"
    ALONE = "suspect"
    NONE = "none"
    """Requests have just arrived, or run without a notable limit."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Present limit of the service, as text."""

    kind: LimitKind
    state: str
    """The present state, without a full stop."""
    remedy: str
    """Remedy; empty if none is needed."""
    waits: str
    """Which requests wait, and for how long; empty if none waits."""

    @property
    def sentence(self) -> str:
        parts = [f"{self.state}: {self.remedy}" if self.remedy else self.state, self.waits]
        return "; ".join(filter(None, parts))


def present_limit(found: Pressure, itl_s: float = 0.0) -> Limit:
    """Return the current bottleneck of the service.

    Args:
        found: the pressure on the service.
        itl_s: current time between two tokens of a request, s; 0 if unknown.
    """
    kind = _kind(found)
    state, remedy = _words(kind, found, itl_s)
    return Limit(kind, state, remedy, _waits(found))


def _kind(found: Pressure) -> LimitKind:
    if not found.waiting:
        return _running_kind(found)
    if not found.workers:
        return LimitKind.NO_WORKER
    most = max(_groups(found).items(), key=lambda each: each[1])[0]
    if most in (WaitReason.TURN, WaitReason.NO_WORKER) and all(each.draining for each in found.workers):
        return LimitKind.DRAINING
    return _queue_kind(found) if most is WaitReason.TURN else _OF_REASON[most]


def _groups(found: Pressure) -> "Counter[WaitReason]":
    """Return the waiting requests by what they lack, with both tenant limits combined. On a tie, the first wins."""
    groups: Counter[WaitReason] = Counter({WaitReason.TURN: found.lacking[WaitReason.TURN]})
    for reason, count in found.lacking.items():
        if reason is not WaitReason.TURN:
            groups[WaitReason.TENANT_LIMIT if reason is WaitReason.TENANT_RATE else reason] += count
    return groups


def _queue_kind(found: Pressure) -> LimitKind:
    """Return the most frequent obstacle for competing requests among the workers."""
    open_ones = [each for each in found.workers if not each.draining]
    obstacles = Counter(each.obstacle for each in open_ones if each.obstacle is not None)
    if not obstacles:
        return _running_kind(found)
    kind = _OF_REASON[obstacles.most_common(1)[0][0]]
    if kind is LimitKind.ROWS and _most_starve(open_ones):
        return LimitKind.CREDIT
    return kind


def _running_kind(found: Pressure) -> LimitKind:
    """Return the main activity of the running requests."""
    if not any(each.rows for each in found.workers):
        return LimitKind.NONE if found.waiting else LimitKind.IDLE if found.workers else LimitKind.NO_WORKER
    if _most_starve(found.workers):
        return LimitKind.CREDIT
    rows = sum(each.rows for each in found.workers)
    prefilling = sum(each.prefilling for each in found.workers)
    return LimitKind.PROMPTS if 2 * prefilling >= rows else LimitKind.DECODE


def _most_starve(workers: "tuple[WorkerPressure, ...] | list[WorkerPressure]") -> bool:
    return 2 * sum(each.starved for each in workers) > sum(each.rows for each in workers)


def _words(kind: LimitKind, found: Pressure, itl_s: float) -> tuple[str, str]:
    """Return the state and the remedy."""
    rows = sum(each.rows for each in found.workers)
    most = sum(each.max_rows for each in found.workers)
    held, total = sum(each.blocks_held for each in found.workers), sum(each.blocks_total for each in found.workers)
    share = held / total if total else 0.0
    decoding = rows - sum(each.prefilling for each in found.workers)
    match kind:
        case LimitKind.IDLE:
            return "idle: no request runs or waits", ""
        case LimitKind.NO_WORKER:
            none = "no worker is connected" if not found.workers else "no connected worker can serve them"
            return none, remedies.NO_WORKER
        case LimitKind.DRAINING:
            return f"{_count(len(found.workers), 'worker')} drained, none takes new requests", remedies.DRAINED
        case LimitKind.ROWS:
            return f"{rows} of {most} rows busy, memory {share:.0%} used", _rows_remedy(rows, held, total)
        case LimitKind.MEMORY:
            return f"KV memory {share:.0%} held by {_count(rows, 'request')} ({rows} of {most} rows)", remedies.MEMORY
        case LimitKind.PROMPTS:
            prefilling = sum(each.prefilling for each in found.workers)
            decodes = f"{_count(decoding, 'request')} in decode"
            state = f"prompts fill the steps: {_count(prefilling, 'prompt')} being computed, {decodes}"
            return state, remedies.PROMPTS if found.waiting else ""
        case LimitKind.DECODE:
            pace = f", {1e3 * itl_s:.3g} ms per token" if itl_s else ""
            state = f"{decoding} of {most} rows decode{pace}, memory {share:.0%} used; decode bandwidth is the limit"
            return state, f"for faster tokens, {remedies.DECODE}"
        case LimitKind.CREDIT:
            starved = sum(each.starved for each in found.workers)
            return f"{starved} of {rows} busy rows are held out, because their readers are slow", remedies.CREDIT
        case LimitKind.TENANT:
            is_rate = found.lacking[WaitReason.TENANT_RATE] > found.lacking[WaitReason.TENANT_LIMIT]
            setting = "tokens_per_s" if is_rate else "max_running"
            whose = f"tenant {found.tenant!r}" if found.tenant else "a tenant"
            state = f"{whose} is at its own limit ({setting}), {rows} of {most} rows busy"
            return state, remedies.tenant(found.tenant, setting)
        case LimitKind.SESSION:
            state = f"the working sets of the active sessions fill the KV memory, {rows} of {most} rows busy"
            return state, remedies.SESSION
        case LimitKind.GRAMMAR:
            return "grammars are being compiled", remedies.GRAMMAR
        case LimitKind.PREFIX:
            return "a prefix that several requests share is being computed for all of them", ""
        case LimitKind.BATCH:
            return f"the batching mode collects requests, {rows} of {most} rows busy", remedies.BATCH
        case LimitKind.ALONE:
            return "a suspect request needs a step of its own", remedies.ALONE
    return "requests have just arrived", ""


def _rows_remedy(rows: int, held: int, total: int) -> str:
    """Return the remedy when all rows are in use. More rows are suggested only if memory for them is available."""
    if total and held > _MUCH_MEMORY * total:
        return "add a worker; more rows would soon lack memory"
    if rows and held:
        fitting = int(_SAFE_MEMORY * total * rows / held)
        return f"{remedies.ROWS} (at the present lengths, memory has room for about {_count(fitting, 'row')})"
    return remedies.ROWS


def _waits(found: Pressure) -> str:
    if not found.waiting:
        return ""
    verb = "waits" if found.waiting == 1 else "wait"
    return f"{_count(found.waiting, 'request')} {verb}, the oldest {found.oldest_s:.0f} s"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


_OF_REASON = {
    WaitReason.ROWS: LimitKind.ROWS,
    WaitReason.MEMORY: LimitKind.MEMORY,
    WaitReason.BUDGET: LimitKind.PROMPTS,
    WaitReason.BATCH: LimitKind.BATCH,
    WaitReason.ALONE: LimitKind.ALONE,
    WaitReason.TENANT_LIMIT: LimitKind.TENANT,
    WaitReason.TENANT_RATE: LimitKind.TENANT,
    WaitReason.SESSION: LimitKind.SESSION,
    WaitReason.GRAMMAR: LimitKind.GRAMMAR,
    WaitReason.PREFIX: LimitKind.PREFIX,
    WaitReason.BOUNDARY: LimitKind.PREFIX,
    WaitReason.CREDIT: LimitKind.CREDIT,
    WaitReason.NO_WORKER: LimitKind.NO_WORKER,
    WaitReason.COPY: LimitKind.NONE,
    WaitReason.DISK: LimitKind.NONE,
    WaitReason.ELSEWHERE: LimitKind.NONE,
    WaitReason.ANSWER: LimitKind.NONE,
    WaitReason.TURN: LimitKind.NONE,
}
