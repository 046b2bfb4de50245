"""Renders the screen of `quire top` from `WatchSteps` messages. Pure: messages in, lines out."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.admin.v1 import admin_pb2 as admin

_BAR = 24
_CURVE = 60
"""Number of seconds that a curve shows."""
_ROWS = 128
"""Maximum number of rows drawn per worker."""
_QUEUED = 5
_INCIDENTS = 5
_LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class _Worker:
    """Statistics of a worker's steps since the last screen."""

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    batch: str = ""
    """The worker's newest step, one character per row."""
    drafts: tuple[int, int] = (0, 0)
    """Counters of verified and accepted draft tokens at the last screen."""


@dataclass(slots=True)
class Top:
    """The numbers on the screen; rates and latencies cover the time since the previous screen."""

    address: str
    _rates: list[admin.ServiceRates] = field(default_factory=list)
    """Rates in the load messages since the last screen."""
    _load: admin.SchedulerLoad | None = None
    _tables: admin.SchedulerTables | None = None
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _incidents: "deque[admin.Incident]" = field(default_factory=lambda: deque(maxlen=_INCIDENTS))
    _dropped: int = 0
    _curves: dict[str, "deque[float]"] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the numbers cover an interval, and the tables have been received."""
        return self._tables is not None and any(rates.seconds > 0 for rates in self._rates)

    def take(self, part: admin.WatchStepsResponse) -> None:
        """Add the content of a message to the numbers."""
        for step in part.steps:
            worker = self._workers.setdefault(step.worker_id, _Worker())
            worker.steps += 1
            worker.tokens += len(step.decode_rows) + sum(step.prefill_tokens)
            worker.busy_s += step.duration.ToNanoseconds() / 1e9
            worker.batch = batch_line(step)
        self._dropped += part.dropped_steps
        self._incidents.extend(part.incidents)
        if part.HasField("tables"):
            self._tables = part.tables
        if part.HasField("load"):
            self._load = part.load
            self._rates.append(part.load.rates)
            self._draw_on(part.load)

    def lines(self) -> list[str]:
        """Return the lines of the screen, and begin the next interval."""
        load, rates = self._load or admin.SchedulerLoad(), self._rates
        seconds = sum(each.seconds for each in rates) or 1.0
        lines = [
            f"quire {self.address}   {len(load.workers)} workers"
            + (f"   {self._dropped} steps were left out" if self._dropped else ""),
            *_leadership_lines(load),
            "",
            *_limit_lines(load.limit),
            "",
            f"requests   {load.running_requests:>8} running   {load.waiting_requests:>8} waiting   "
            f"{sum(each.arrived_requests for each in rates) / seconds:>8.1f} arrived/s",
            f"completed  {sum(each.completed_requests for each in rates) / seconds:>8.1f} /s        "
            f"{sum(each.good_requests for each in rates) / seconds:>8.1f} /s within their targets",
            f"tokens/s   {sum(each.output_tokens for each in rates) / seconds:>8.0f} output    "
            f"{sum(each.prompt_tokens for each in rates) / seconds:>8.0f} prompt    {self._curve('tokens')}",
            _cached_line(rates, seconds),
            f"TTFT       {_times(each.ttft for each in rates):<24} {self._curve('ttft')}",
            f"ITL        {_times(each.itl for each in rates):<24} {self._curve('itl')}",
            "",
            f"{'worker':<16} {'state':<8} {'KV held, cached':<{_BAR + 2}}  used     rows  steps/s  tokens/s  busy",
        ]
        for worker in load.workers:
            lines += self._worker_lines(worker, seconds)
        lines += self._queue_lines(load)
        for incident in self._incidents:
            lines.append(f"{incident.time.ToDatetime():%H:%M:%S} UTC  {_incident(incident)}")
        self._rates = []
        for seen in self._workers.values():
            seen.steps = seen.tokens = 0
            seen.busy_s = 0.0
        return lines

    def _draw_on(self, load: admin.SchedulerLoad) -> None:
        rates = load.rates
        values = {
            "tokens": rates.output_tokens / rates.seconds if rates.seconds else 0.0,
            "ttft": rates.ttft.p50,
            "itl": rates.itl.p50,
        }
        for name, value in values.items():
            self._curves.setdefault(name, deque(maxlen=_CURVE)).append(value)

    def _curve(self, name: str) -> str:
        return curve(self._curves.get(name, ()))

    def _worker_lines(self, worker: admin.Worker, seconds: float) -> list[str]:
        seen = self._workers.setdefault(worker.worker_id, _Worker())
        total = worker.total_blocks or 1
        held = (total - worker.free_blocks - worker.cached_blocks) / total
        state = "draining" if worker.draining else "serving"
        line = (
            f"{worker.worker_id[:16]:<16} {state:<8} {bar(held, worker.cached_blocks / total)} {held:>5.0%}"
            f" {worker.running_requests:>4}/{worker.rows:<4} {seen.steps / seconds:>6.1f}"
            f" {seen.tokens / seconds:>9.0f} {min(seen.busy_s / seconds, 1.0):>5.0%}"
        )
        lines = [line, *_cache_lines(worker)]
        # The counters of a worker restart at 0 when the worker reconnects.
        before = seen.drafts if seen.drafts[0] <= worker.draft_tokens else (0, 0)
        verified, accepted = worker.draft_tokens - before[0], worker.accepted_draft_tokens - before[1]
        seen.drafts = worker.draft_tokens, worker.accepted_draft_tokens
        if verified:
            each = f"{verified / seen.steps:.1f} per step" if seen.steps else f"{verified}"
            lines.append(f"  drafts: {each}, {accepted / verified:.0%} accepted")
        return [*lines, f"  {seen.batch}"] if seen.batch and worker.running_requests else lines

    def _queue_lines(self, load: admin.SchedulerLoad) -> list[str]:
        reasons = [f"{count} {reason}" for reason, count in sorted(load.waiting_by_reason.items()) if count]
        if not reasons or self._tables is None:
            return [""]
        lines = ["", f"waiting ({self._tables.policy}): {', '.join(reasons)}"]
        tenants = [f"{each.waiting_requests} {each.tenant or '(none)'}" for each in load.waiting_by_tenant]
        if tenants:
            lines.append(f"by tenant: {', '.join(tenants[:8])}")
        for queue in self._tables.queues:
            if queue.reason == "room":
                for place, each in enumerate(queue.first[:_QUEUED], 1):
                    lines.append(
                        f"{place:>3}. {each.request_id[:40]:<40} {each.tokens:>7} tokens {each.waited_seconds:>6.1f} s"
                        f"  {each.waits_for}"
                    )
        return lines


def _cached_line(rates: Sequence[admin.ServiceRates], seconds: float) -> str:
    """Return a line with the prompt tokens that were not computed, and their share of all prompt tokens."""
    cached = sum(each.cached_prompt_tokens for each in rates)
    total = cached + sum(each.prompt_tokens for each in rates)
    share = f"{cached / total:.0%}" if total else "-"
    return f"cached     {cached / seconds:>8.0f} prompt tokens/s, {share} of all prompt tokens"


def _leadership_lines(load: admin.SchedulerLoad) -> list[str]:
    if not load.HasField("leadership"):
        return []
    found = load.leadership
    standbys = f"{found.ready_standbys} ready" if found.ready_standbys else "none ready"
    if found.other_standbys:
        standbys += f", {found.other_standbys} copying"
    number = f" under number {found.leader_number}" if found.leader_number else ""
    lag = f", {found.lag_bytes} bytes behind" if found.leader_number else ""
    return [f"leader     {found.leader}{number} for {found.seconds:.0f} s   standbys: {standbys}{lag}"]


def _cache_lines(worker: admin.Worker) -> list[str]:
    """Return lines with the kinds of cache and their memory; none if all layers have full attention."""
    if all(kind == "full" for kind in worker.cache_kinds):
        return []
    held = worker.total_blocks - worker.free_blocks - worker.cached_blocks
    parts = []
    for kind in worker.cache_kinds:
        if kind == "state":
            states = f"{worker.running_requests} of {worker.rows} rows"
            parts.append(f"state {states}{_memory(worker.running_requests * worker.state_bytes)}")
            continue
        blocks = worker.window_blocks if kind == "window" else max(0, held - worker.window_blocks)
        parts.append(f"{kind} {blocks} blocks{_memory(blocks * worker.block_bytes)}")
    lines = [f"  cache: {', '.join(parts)}"]
    if worker.HasField("checkpoints"):
        found = worker.checkpoints
        lines.append(
            f"  checkpoints: {found.used} of {found.total} used, {found.saved} saved, {found.restored} restored,"
            f" {found.evicted} evicted"
        )
    return lines


def _memory(num_bytes: int) -> str:
    """Return a size in parentheses; empty if it is not known."""
    if not num_bytes:
        return ""
    power = min(3, (num_bytes.bit_length() - 1) // 10)
    return f" ({num_bytes / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB')[power]})"


def _limit_lines(limit: admin.PresentLimit) -> list[str]:
    """Return lines with the limit that holds the service back, the remedy, and the requests that wait for it."""
    lines = [f"now: {limit.state}"] if limit.state else []
    if limit.remedy:
        lines.append(f"     what helps: {limit.remedy}")
    if limit.waits:
        lines.append(f"     {limit.waits}")
    return lines


def batch_line(step: admin.WatchedStep) -> str:
    """Return a step as one character per row: P prefill, # decode, - held out, . idle."""
    shown = dict.fromkeys(step.decode_rows, "#") | dict.fromkeys(step.waiting_rows, "-")
    shown |= dict.fromkeys(step.prefill_rows, "P")
    count = min(max(shown, default=-1) + 1, _ROWS)
    return "".join(shown.get(row, ".") for row in range(count))


def curve(values: Iterable[float]) -> str:
    """Draw values as block characters with eight heights, scaled to the largest value."""
    found = list(values)
    most = max(found, default=0.0)
    return "".join(_LEVELS[round(8 * value / most)] if most > 0 else _LEVELS[0] for value in found)


def bar(held: float, cached: float) -> str:
    """Draw a bar that shows the fraction held by requests and the fraction held only by the prefix cache."""
    filled = round(held * _BAR)
    kept = min(round((held + cached) * _BAR), _BAR) - filled
    return "[" + "#" * filled + "-" * kept + " " * (_BAR - filled - kept) + "]"


def _times(found: Iterable[admin.Quantiles]) -> str:
    """Return, over all seconds with samples, the mean of the medians and the largest 99th percentile."""
    counts = [each for each in found if each.count]
    if not counts:
        return "-"
    median = sum(each.p50 * each.count for each in counts) / sum(each.count for each in counts)
    return f"{1000 * median:.0f} / {1000 * max(each.p99 for each in counts):.0f} ms  (p50 / p99)"


def _incident(incident: admin.Incident) -> str:
    kind = admin.Incident.Kind.Name(incident.kind).removeprefix("KIND_").replace("_", " ").lower()
    about = (incident.worker_id, incident.request_id, incident.detail)
    return f"{kind}: {', '.join(filter(None, about))}"
