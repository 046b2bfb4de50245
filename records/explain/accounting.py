"""Divides a request's life into causes.

One pass goes through the life from start to end. Each moment is charged to exactly one cause, so the durations always
sum to the end-to-end time. A life has four phases:

* at the front end before submission: tokenisation, the grammar check, and the rest;
* waiting: charged to the reason in the core's notes, or to the event that previously removed the request from its row;
* in a row: charged step by step (see `_Walk._step`);
* after the end: the transfer to the front end, detokenising, the client.

After a preemption, a move, or the loss of a worker or scheduler, all time until the request decodes again is charged to
that event. This includes waiting and recomputation.

A request that waits for its turn is charged to the limit that holds back its queue: rows, memory, or the step's token
budget. The planner notes this limit per worker. Once a later request is admitted first, the rest of the wait is charged
to the policy's order. The explanation names the requests that held the rows during the wait.

If a step also has chunks of other prompts, its forward pass is divided. A decoding request would have needed the usual
time of a step without prompts, so the rest is charged to the other prompts. For a request in prefill, the time is
divided in proportion to the tokens. If a decode step takes longer than the smallest decode step usually does, the
difference is charged to the step's other rows. If a step took more than `SLOW` times its usual time, the excess is
charged to the worker.

Time in which the scheduler made no entry at all is charged to the scheduler, whatever the request waited for.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from records.explain.facts import Life, Step, StreamKey
from scheduler_svc.core.interface.records import Note, NoteKind, WaitReason

SLOW = 2.0
"""A step that takes more than this multiple of its usual time is slow, and the excess is charged to the worker."""
_LAG_S = 0.01
"""A step that begins within this time after its plan is never late, however short it is, seconds."""
_FROZEN = "the scheduler made no entry in its record"
_NUM_NOTES_REFUSED = 2
"""Number of notes for a request that was refused on arrival."""
MAX_NEIGHBOURS = 8
"""Maximum number of neighbours that are named in the worst step and for each cause."""


class CauseKind(enum.Enum):
    """Causes, in the order in which they occur; the value is the name in text and JSON output."""

    FRONT_END = "front end"
    TOKENISING = "tokenising"
    GRAMMAR_CHECK = "checking the grammar"
    REFUSED = "refused"
    QUEUE = "waiting for its turn"
    ORDER = "waiting behind later requests"
    BUDGET = "waiting for room in a step that other prompts fill"
    MEMORY = "waiting for memory"
    ROWS = "waiting for a free row"
    TENANT = "waiting for its tenant's limit"
    SESSION = "waiting for memory for a new session"
    GRAMMAR = "waiting for its grammar's compilation"
    PREFIX = "waiting for a prefix that another request computes"
    BOUNDARY = "waiting for the end of a prefix that another request computes"
    PREFIX_COPY = "waiting for its prefix, which is copied from host memory"
    PREFIX_READ = "waiting for its prefix, which is read from disk"
    BATCH = "waiting for a batch"
    PLACEMENT = "waiting for another worker's plan"
    ALONE = "waiting for a step of its own"
    NO_WORKER = "waiting for a worker"
    STEP_BEFORE = "waiting for the step before"
    OWN_PREFILL = "own prefill"
    COLD_PREFIX = "own prefill of a prefix that was known before"
    UNUSABLE_PREFIX = "own prefill of a cached prefix after which it could not begin"
    OTHER_PROMPTS = "other prompts' chunks in its steps"
    OWN_DECODE = "own decode"
    NEIGHBOURS = "other requests in its steps"
    SLOW_WORKER = "slow worker"
    SAMPLING = "sampling"
    COPIES = "block copies in its steps"
    PREEMPTED = "preempted"
    SWAPPED = "swapped out"
    WORKER_LOST = "worker lost"
    WORKER_SILENT = "worker frozen"
    SCHEDULER_LOST = "scheduler restarted"
    SCHEDULER_STALLED = "scheduler frozen"
    SUBMITTED_AGAIN = "connection to the scheduler lost"
    UNRECORDED = "not recorded"
    MOVED = "moved to another worker"
    PREFIX_FAILED = "shared prefix failed"
    HELD_CREDIT = "held out: its reader took no output"
    HELD_MEMORY = "held out: no free block"
    LINK = "link and scheduler"
    DETOKENISING = "detokenising"
    CLIENT = "the client's own slowness"


_OF_REASON = {
    WaitReason.TURN: CauseKind.QUEUE,
    WaitReason.MEMORY: CauseKind.MEMORY,
    WaitReason.ROWS: CauseKind.ROWS,
    WaitReason.TENANT_LIMIT: CauseKind.TENANT,
    WaitReason.TENANT_RATE: CauseKind.TENANT,
    WaitReason.SESSION: CauseKind.SESSION,
    WaitReason.GRAMMAR: CauseKind.GRAMMAR,
    WaitReason.PREFIX: CauseKind.PREFIX,
    WaitReason.BOUNDARY: CauseKind.BOUNDARY,
    WaitReason.CREDIT: CauseKind.HELD_CREDIT,
    WaitReason.BATCH: CauseKind.BATCH,
    WaitReason.ANSWER: CauseKind.STEP_BEFORE,
    WaitReason.ELSEWHERE: CauseKind.PLACEMENT,
    WaitReason.ALONE: CauseKind.ALONE,
    WaitReason.NO_WORKER: CauseKind.NO_WORKER,
    WaitReason.BUDGET: CauseKind.BUDGET,
    WaitReason.COPY: CauseKind.PREFIX_COPY,
    WaitReason.DISK: CauseKind.PREFIX_READ,
}
_OF_QUEUE = frozenset((WaitReason.TURN, WaitReason.ROWS, WaitReason.BUDGET))
"""Wait reasons for which the note about the worker's queue is more precise, and replaces them."""
_OF_ORDER = frozenset((CauseKind.QUEUE, CauseKind.ROWS, CauseKind.BUDGET))
"""Waits that are charged to the policy's order once a later request has been admitted first."""
_REFUSALS = frozenset(("queue_full", "tenant_limit", "invalid", "no_worker", "deadline", "duplicate", "shutdown"))
"""End reasons that mean a refusal if the request ends as soon as it arrives."""
_OF_DEPARTURE = {
    NoteKind.PREEMPTED: CauseKind.PREEMPTED,
    NoteKind.SWAPPED: CauseKind.SWAPPED,
    NoteKind.LOST: CauseKind.WORKER_LOST,
    NoteKind.SILENT: CauseKind.WORKER_SILENT,
    NoteKind.SCHEDULER_LOST: CauseKind.SCHEDULER_LOST,
    NoteKind.SUBMITTED_AGAIN: CauseKind.SUBMITTED_AGAIN,
    NoteKind.MOVED: CauseKind.MOVED,
    NoteKind.UNRECORDED: CauseKind.UNRECORDED,
    NoteKind.PREFIX_FAILED: CauseKind.PREFIX_FAILED,
}


@dataclass(slots=True)
class Cause:
    """One cause with its share of the time."""

    kind: CauseKind
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)
    """Notes that the core made about this cause."""
    by: "Counter[StreamKey]" = field(default_factory=Counter)
    """Contributing requests, each with a weight: its number of prompt tokens, or 1."""


@dataclass(frozen=True, slots=True)
class WorstStep:
    """The step whose result the request waited for longest."""

    step: Step
    seconds: float
    """Time from the request's previous result to the result of this step."""
    neighbours: tuple[tuple[StreamKey, int], ...]
    """The other requests in the step with their numbers of tokens, most tokens first."""
    num_neighbours: int


@dataclass(frozen=True, slots=True)
class Account:
    """The explanation of one life."""

    life: Life
    causes: tuple[Cause, ...]
    """Largest first."""
    total_s: float
    worst: WorstStep | None
    error_s: float | None
    """Maximum error when the link time is divided between both directions; None without a front-end report."""


def account(life: Life) -> Account:
    """Divide a request's life into causes."""
    walk = _Walk(life)
    if life.end in _REFUSALS and len(life.notes) == _NUM_NOTES_REFUSED:
        total = walk.refused()
    else:
        walk.front_end()
        walk.core()
        total = walk.after_end()
    causes = sorted((each for each in walk.causes.values() if each.seconds > 0), key=lambda each: -each.seconds)
    return Account(life, tuple(causes), total, walk.worst, walk.error_s)


class _Walk:
    """One pass through a life; all time up to `_at` is already charged."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._key = life.key
        self._at = life.notes[0].time
        self.causes: dict[CauseKind, Cause] = {}
        self.worst: WorstStep | None = None
        self.error_s: float | None = None
        self._total = 0.0
        self._steps = list(life.steps)
        self._next = 0
        """Index of the first step that was answered after `_at`."""
        self._departure: Note | None = None
        """The event that last removed the request from its row; None once the request decodes again."""
        self._held: Note | None = None
        """Why the request is held out of steps; None from its next step on."""
        self._has_decoded = False
        self._num_computed = life.num_cached_tokens

    def refused(self) -> float:
        """Charge the whole time to the refusal."""
        life, report = self._life, self._life.report
        in_core = life.notes[-1].time - life.notes[0].time
        seconds = in_core if report is None else max(in_core, report.submitted_s + report.finished_s)
        self.error_s = None if report is None else 0.0
        self._charge(CauseKind.REFUSED, seconds, life.notes[-1].text.removeprefix("ended: "))
        return self._total

    # ---------------------------------------------------------------- front end

    def front_end(self) -> None:
        """Charge the time before the submission."""
        report = self._life.report
        if report is None:
            return
        rest = report.submitted_s
        for kind, seconds in (
            (CauseKind.TOKENISING, report.tokenise_s),
            (CauseKind.GRAMMAR_CHECK, report.grammar_s),
            (CauseKind.SCHEDULER_LOST, report.no_scheduler_s),
        ):
            part = min(max(seconds, 0.0), rest)
            self._charge(kind, part)
            rest -= part
        self._charge(CauseKind.FRONT_END, rest)

    def after_end(self) -> float:
        """Charge the time after the end, which the core does not see, and return the end-to-end time."""
        report, life = self._life.report, self._life
        if report is None or life.until is not None:
            return self._total
        in_core = self._at - life.notes[0].time
        link = max(0.0, report.ended_s - in_core)
        self.error_s = link / 2
        first = life.notes[0].time
        frozen = min(link, sum(end - begin for begin, end in self._stalls_between(first - link, first)))
        self._charge(CauseKind.SCHEDULER_STALLED, frozen, _FROZEN)
        self._charge(CauseKind.LINK, link - frozen)
        rest = max(0.0, report.finished_s - max(report.ended_s, in_core))
        for kind, seconds in ((CauseKind.CLIENT, report.client_s), (CauseKind.DETOKENISING, report.detokenise_s)):
            part = min(max(seconds, 0.0), rest)
            self._charge(kind, part)
            rest -= part
        self._charge(CauseKind.FRONT_END, rest)
        self._charge_stalled_front_end(report.stalled_s)
        return self._total

    def _charge_stalled_front_end(self, seconds: float) -> None:
        """Charge a front-end stall to the front end, instead of the causes that other processes saw."""
        moved = 0.0
        for kind in (CauseKind.SUBMITTED_AGAIN, CauseKind.LINK, CauseKind.HELD_CREDIT, CauseKind.CLIENT):
            cause = self.causes.get(kind)
            if cause is not None:
                part = min(cause.seconds, seconds - moved)
                cause.seconds -= part
                moved += part
        self._total -= moved
        self._charge(CauseKind.FRONT_END, moved, "its process did nothing for a while")

    # ---------------------------------------------------------------- core

    def core(self) -> None:
        """Charge the time from the arrival at the core to the end, or to the present."""
        life = self._life
        reason, in_row = WaitReason.TURN, False
        for note in life.notes[1:]:
            if in_row:
                self._run_until(note.time, lost=note if note.kind in _LOSSES else None)
            else:
                self._wait_until(note.time, reason)
            match note.kind:
                case NoteKind.WAITS:
                    reason = WaitReason(note.text)
                case NoteKind.HELD:
                    self._held = note
                case NoteKind.ARRIVED:
                    reason, self._departure = WaitReason.TURN, None
                case NoteKind.ADMITTED:
                    in_row = True
                    self._skip_steps()
                case kind if kind in _OF_DEPARTURE:
                    reason, in_row = WaitReason.TURN, False
                    self._departure, self._held = note, None
        if life.until is not None:
            if in_row:
                self._run_until(life.until, lost=None)
            else:
                self._wait_until(life.until, reason)

    def _wait_until(self, end: float, reason: WaitReason) -> None:
        for begin, finish in self._stalls_between(self._at, end):
            self._wait_awake(begin, reason)
            self._charge(CauseKind.SCHEDULER_STALLED, finish - self._at, _FROZEN)
            self._at = max(self._at, finish)
        self._wait_awake(end, reason)

    def _wait_awake(self, end: float, reason: WaitReason) -> None:
        """Charge a wait during which the scheduler did not stall."""
        if end <= self._at:
            return
        if self._departure is not None and reason is not WaitReason.CREDIT:
            self._charge_departure(end - self._at)
        elif reason in _OF_QUEUE:
            self._wait_in_queue(end, reason)
        else:
            kind = _OF_REASON[reason]
            detail = "" if kind.value.endswith(reason.value) else reason.value
            self._charge(kind, end - self._at, detail, self._holders(kind, self._at, end))
        self._at = end

    def _wait_in_queue(self, end: float, reason: WaitReason) -> None:
        """Charge a wait for the request's turn to the limits that held back the queue.

        The limits are those of the worker that admitted the request, or of any worker.
        """
        life = self._life
        worker_id = next((worker for time, worker in life.placements if time >= end - _LAG_S), None)
        known = [each for each in life.obstacles if worker_id is None or each.worker_id == worker_id]
        before = [each for each in known if each.time <= self._at]
        changes = [(self._at, before[-1].reason)] if before else [(self._at, reason)]
        changes += [(each.time, each.reason) for each in known if self._at < each.time < end]
        overtaken = min((each.time for each in life.went_first if each.is_later), default=end)
        for (begin, obstacle), finish in zip(changes, [time for time, _ in changes[1:]] + [end], strict=True):
            kind = _OF_REASON[obstacle if obstacle is not None else WaitReason.TURN]
            parts = [(begin, finish, kind)]
            if kind in _OF_ORDER and overtaken < finish:
                middle = max(begin, overtaken)
                parts = [(begin, middle, kind), (middle, finish, CauseKind.ORDER)]
            for since, until, each in parts:
                if each is CauseKind.BUDGET and self._waits_for_prefix(since, until, worker_id):
                    each = CauseKind.PREFIX
                detail = f"the policy is {life.policy}" if each is CauseKind.ORDER and life.policy else ""
                self._charge(each, until - since, detail, self._holders(each, since, until, worker_id))

    def _waits_for_prefix(self, since: float, until: float, worker_id: str | None) -> bool:
        """Return whether the steps were full of a prompt that shares most of this request's prompt.

        The planner does not look at the prompts of requests for which a step has no room. More room would not help this
        request: it would wait for the other prompt.
        """
        life = self._life
        if life.known_by is None or 2 * life.known_tokens < life.num_prompt_tokens:
            return False
        return life.known_by in self._holders(CauseKind.BUDGET, since, until, worker_id)

    def _holders(
        self, kind: CauseKind, since: float, until: float, worker_id: str | None = None
    ) -> "Counter[StreamKey]":
        """Return the weighted requests that held the resource for which this request waited."""
        life, found = self._life, Counter[StreamKey]()
        if until <= since:
            return found
        if kind in (CauseKind.ROWS, CauseKind.MEMORY, CauseKind.TENANT, CauseKind.ALONE):
            for each in life.holdings:
                overlap = min(each.until, until) - max(each.since, since)
                is_meant = each.tenant == life.tenant if kind is CauseKind.TENANT else True
                if overlap > 0 and is_meant and worker_id in (None, each.worker_id):
                    weight = each.num_tokens if kind is CauseKind.MEMORY else 1
                    found[each.key] += max(1, round(1e3 * overlap * weight))
        elif kind is CauseKind.BUDGET:
            for step in life.steps:
                if step.planned < until and step.answered > since and worker_id in (None, step.worker_id):
                    found.update(step.chunks)
            found.pop(self._key, None)
        elif kind is CauseKind.ORDER:
            found.update(each.key for each in life.went_first if each.is_later and each.time <= until)
        elif kind is CauseKind.QUEUE:
            found.update(each.key for each in life.went_first if since <= each.time <= until)
        elif kind is CauseKind.PREFIX and life.known_by is not None:
            found[life.known_by] = 1
        return found

    def _stalls_between(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Return the parts of the scheduler's stalls that lie in an interval."""
        return [(max(a, begin), min(b, end)) for a, b in self._life.stalls if min(b, end) > max(a, begin)]

    def _charge_link(self, end: float) -> None:
        """Charge the time up to `end`, in which the request was on its way between processes."""
        for begin, finish in self._stalls_between(self._at, end):
            self._charge(CauseKind.LINK, begin - self._at)
            self._charge(CauseKind.SCHEDULER_STALLED, finish - begin, _FROZEN)
            self._at = finish
        self._charge(CauseKind.LINK, end - self._at)
        self._at = max(self._at, end)

    def _skip_steps(self) -> None:
        """Skip steps that were answered before the request was admitted."""
        while self._next < len(self._steps) and self._steps[self._next].answered <= self._at:
            self._next += 1

    def _run_until(self, end: float, *, lost: Note | None) -> None:
        """Charge time in a row up to `end`. With `lost`, the loss of the worker was detected at that time."""
        steps = self._steps
        others: list[Step] = []
        while self._next < len(steps) and steps[self._next].answered <= end:
            step = steps[self._next]
            self._next += 1
            if step.holds(self._key):
                self._step(step, others)
                others = []
            else:
                others.append(step)
        if lost is not None:
            self._charge(_OF_DEPARTURE[lost.kind], end - self._at, lost.text)
            self._at = max(self._at, end)
        else:
            # The worker may still be busy with steps whose results arrive later.
            self._gap(end, others + [step for step in steps[self._next :] if step.planned < end])

    def _step(self, step: Step, others: list[Step]) -> None:
        """Charge the time up to the result of a step that computed the request."""
        before = self._at
        begin, finish = _execution(step)
        begin = min(max(begin, self._at), step.answered)
        self._gap(begin, others, step)
        self._held = None
        finish = min(max(finish, begin), step.answered)
        busy = step.busy_s
        # The worker may have begun the step before the previous result arrived. Then only the remainder delays the
        # request.
        share = (finish - begin) / busy if busy > 0 else 0.0
        is_chunk = self._key in step.chunks
        if not is_chunk:
            self._departure, self._has_decoded = None, True
        if busy > 0:
            self._charge(CauseKind.COPIES, step.copy_s * share)
            usual = self._charge_excess(step, share)
            theirs = self._charge_neighbours(step, share, usual)
            self._charge(CauseKind.SAMPLING, step.sample_s * share * (usual - theirs))
            self._forward(step, (step.forward_s + step.prepare_s) * share * (usual - theirs), theirs)
        else:
            self._forward(step, finish - begin)
        self._at = finish
        self._charge_link(step.answered)
        seconds = step.answered - before
        if self.worst is None or seconds > self.worst.seconds:
            self.worst = _worst(step, seconds, self._key)
        self._num_computed += step.chunks.get(self._key, 0)

    def _charge_excess(self, step: Step, share: float) -> float:
        """Charge the time by which a step exceeded its usual time; return the usual time's share, 0 to 1."""
        usual = self._life.usual.step_s(step) if self._life.usual is not None else None
        if usual is None or step.computing_s <= SLOW * usual:
            return 1.0
        part = usual / step.computing_s
        times = f"a step of {step.num_tokens} tokens on {step.worker_id} usually takes {usual * 1e3:.1f} ms"
        self._charge(CauseKind.SLOW_WORKER, step.computing_s * share * (1.0 - part), times)
        return part

    def _charge_neighbours(self, step: Step, share: float, usual: float) -> float:
        """Charge the time caused by the other decode rows; return their part of the step, 0 to `usual`."""
        others = sorted(key for key in step.decodes if key != self._key)
        known = self._life.usual
        if known is None or not others or self._key in step.chunks or self._departure is not None:
            return 0.0
        alone, together = known.alone_s(1 + len(others)), known.decode_s(len(step.decodes))
        if alone is None or together is None or step.computing_s <= 0:
            return 0.0
        part = min(usual, max(0.0, min(together, step.computing_s * usual) - alone) / step.computing_s)
        self._charge(CauseKind.NEIGHBOURS, step.computing_s * share * part, by=others)
        return part

    def _forward(self, step: Step, seconds: float, neighbours: float = 0.0) -> None:
        """Divide a forward pass's time; `neighbours` is the part caused by the other rows."""
        others = {key: tokens for key, tokens in step.chunks.items() if key != self._key}
        theirs = 0.0
        if others:
            theirs = seconds * self._share_of_others(step, sum(others.values()), neighbours)
            self._charge(CauseKind.OTHER_PROMPTS, theirs, by=others)
        own = seconds - theirs
        if self._departure is not None:
            self._charge_departure(own)
        elif self._key not in step.chunks:
            self._charge(CauseKind.OWN_DECODE, own)
        else:
            self._charge_prefill(own, step.chunks[self._key])

    def _share_of_others(self, step: Step, num_tokens: int, neighbours: float) -> float:
        """Return the share of other prompts in a forward pass, after removing the part for the other rows."""
        without = None
        if self._key not in step.chunks and self._life.usual is not None:
            without = self._life.usual.decode_s(len(step.decodes))
        if without is None or step.computing_s <= 0:
            return num_tokens / step.num_tokens
        rest = step.computing_s * (1.0 - neighbours)
        return max(0.0, 1.0 - max(0.0, without - step.computing_s * neighbours) / rest) if rest > 0 else 0.0

    def _charge_prefill(self, seconds: float, num_tokens: int) -> None:
        """Charge the request's own prefill.

        Cached tokens that it could not use count as such, and other tokens that an earlier request also had as a cold
        prefix.
        """
        life = self._life
        cached = life.num_cached_tokens + life.num_unusable_tokens
        unusable = min(max(cached - self._num_computed, 0), num_tokens)
        self._charge(CauseKind.UNUSABLE_PREFIX, seconds * unusable / num_tokens)
        known = min(max(life.known_tokens - self._num_computed, unusable), num_tokens) - unusable
        cold = seconds * known / num_tokens
        if cold:
            by = (life.known_by,) if life.known_by is not None else ()
            turn = next((note.text for note in life.notes if note.kind is NoteKind.SESSION), "")
            self._charge(CauseKind.COLD_PREFIX, cold, turn, by=by)
        self._charge(CauseKind.OWN_PREFILL, seconds * (1.0 - (unusable + known) / num_tokens))

    def _gap(self, end: float, others: list[Step], before: Step | None = None) -> None:
        """Charge the time up to `end`, during which no step computed the request.

        Args:
            end: the end of the gap.
            others: the worker's other steps.
            before: the step with the request that begins at `end`. If the worker was free, time before it is a delay.
        """
        if end <= self._at:
            return
        if self._held is not None and self._held.time < end:
            since = max(self._at, self._held.time)
            self._charge_busy(since, others)
            kind = _HELD.get(self._held.text, CauseKind.HELD_MEMORY)
            self._charge(kind, end - since, self._held.text)
        else:
            self._charge_busy(end, others)
            if self._departure is not None:
                self._charge_departure(end - self._at)
            else:
                self._charge_lag(end, before)
        self._at = end

    def _charge_lag(self, end: float, step: Step | None) -> None:
        """Charge the time from a plan to the start of its step, which ends at `end`."""
        for begin, finish in self._stalls_between(self._at, end):
            self._charge(CauseKind.LINK, begin - self._at)
            self._charge(CauseKind.SCHEDULER_STALLED, finish - begin, _FROZEN)
            self._at = finish
        seconds = end - self._at
        usual = self._life.usual.step_s(step) if self._life.usual is not None and step is not None else None
        if step is not None and usual is not None and seconds > SLOW * max(usual, _LAG_S):
            late = f"{step.worker_id} began late with a step"
            self._charge(CauseKind.SLOW_WORKER, seconds - max(usual, _LAG_S), late)
            seconds = max(usual, _LAG_S)
        self._charge(CauseKind.LINK, seconds)

    def _charge_busy(self, end: float, others: list[Step]) -> None:
        """Charge the time before `end` during which the worker was busy with other steps."""
        for step in others:
            begin, finish = _execution(step)
            self._charge_idle(min(begin, end))
            seconds = min(finish, end) - self._at
            if seconds <= 0:
                continue
            if self._departure is not None:
                self._charge_departure(seconds)
            elif step.chunks:
                self._charge(CauseKind.OTHER_PROMPTS, seconds, by=step.chunks)
            else:
                self._charge(CauseKind.STEP_BEFORE, seconds, by=tuple(step.decodes)[:MAX_NEIGHBOURS])
            self._at = min(finish, end)
        if self._held is not None:
            self._charge_idle(end)

    def _charge_idle(self, end: float) -> None:
        if end > self._at:
            self._charge_link(end)

    # ----------------------------------------------------------------

    def _charge_departure(self, seconds: float) -> None:
        note = self._departure
        assert note is not None
        by: Counter[StreamKey] = Counter()
        if note.by == self._key:  # The request itself lacked memory.
            by = self._holders(CauseKind.MEMORY, self._at, self._at + seconds)
        elif note.by is not None:
            by[StreamKey(*note.by)] = 1
        self._charge(_OF_DEPARTURE[note.kind], seconds, note.text, by)

    def _charge(
        self,
        kind: CauseKind,
        seconds: float,
        detail: str = "",
        by: Mapping[StreamKey, int] | Iterable[StreamKey] = (),
    ) -> None:
        if seconds <= 0:
            return
        cause = self.causes.get(kind)
        if cause is None:
            cause = self.causes[kind] = Cause(kind)
        cause.seconds += seconds
        self._total += seconds
        if detail and detail not in cause.details and len(cause.details) < MAX_NEIGHBOURS:
            cause.details.append(detail)
        cause.by.update(by)


_LOSSES = frozenset((NoteKind.LOST, NoteKind.SILENT))
_HELD = {WaitReason.CREDIT.value: CauseKind.HELD_CREDIT, WaitReason.MEMORY.value: CauseKind.HELD_MEMORY}


def _execution(step: Step) -> tuple[float, float]:
    """Return when the worker began and finished a step, limited to the times of its plan and its result."""
    if step.started is None:
        return step.planned, step.answered
    begin = min(max(step.started, step.planned), step.answered)
    return begin, min(begin + step.busy_s, step.answered)


def _worst(step: Step, seconds: float, key: StreamKey) -> WorstStep:
    tokens = dict.fromkeys(step.decodes, 1) | dict(step.chunks)
    tokens.pop(key, None)
    most = sorted(tokens.items(), key=lambda each: -each[1])
    return WorstStep(step, seconds, tuple(most[:MAX_NEIGHBOURS]), len(most))
