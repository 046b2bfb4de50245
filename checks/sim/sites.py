"""Worker processes and their links, which register, execute plans, send results, and have faults.

The model executes each plan as soon as the core has made it, even if the worker is already dead, so that every plan is
checked. Only the result depends on the worker. Links preserve message order. Faults are chosen per step.
"""

import dataclasses
import random
from collections import deque
from dataclasses import dataclass, field

from checks.sim.answers import malformed, with_unknown_failure
from checks.sim.coverage import Limit
from checks.sim.disks import Disk
from checks.sim.faults import Fault
from checks.sim.scenario import MODELS, WorkerSize, draw_size
from checks.sim.traffic import UNUSABLE
from checks.sim.world import World
from records.rules.model_worker import ModelWorker
from records.rules.oracle import grammar_key
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.disk import DiskJob
from scheduler_svc.core.interface.plan import Plan

_NOTICE_S = 0.05
"""Time within which a dead connection is detected: the ping interval."""
_FAILED_GRAMMARS = 0.1
"""Share of grammars that one worker cannot compile although another may."""


@dataclass(slots=True)
class Sent:
    """A plan without a result."""

    answer: ev.StepDone
    """Result from a correct worker."""
    time: float
    excused: float = 0.0
    """Time for which the scheduler itself was blocked."""
    names: tuple[StreamName, ...] = ()
    """Streams whose rows are in the plan."""


@dataclass(slots=True, eq=False)
class Epoch:
    """A worker's time from its welcome to its loss."""

    number: int
    peer: ev.Peer
    worker_id: str
    model: ModelWorker
    in_flight: deque[Sent] = field(default_factory=deque)
    compiling_until: float = 0.0
    dead_from: float = float("inf")
    """Time after which the worker sends nothing."""
    failed: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (row, generation) that were made to fail."""
    spoilt: list[StreamName] = field(default_factory=list)
    """Streams whose rows write invalid KV from the present step on."""
    must_leave: list[tuple[int, int, StreamName]] = field(default_factory=list)
    """Triples (row, generation, stream) that no later plan may use."""
    answered_at: float = 0.0
    """Time of the newest result."""
    is_lost: bool = False
    """Whether the core has ended it."""
    last_admission: float = 0.0
    draining: bool = False
    asked: set[bytes] = field(default_factory=set)
    """Grammars that the core requested and the worker has not reported, by key."""
    compiled: set[bytes] = field(default_factory=set)
    """Grammars that the core knows the worker has compiled."""
    cannot: set[bytes] = field(default_factory=set)
    """Grammars that the core knows the worker cannot compile."""
    context: int = 0
    """Longest sequence that fits on the worker."""
    jobs: dict[int, tuple[float, DiskJob]] = field(default_factory=dict)
    """Disk jobs whose report the core does not have, by ID, with the time of the order."""


class Site:
    """One worker through all its incarnations."""

    def __init__(self, world: World, number: int, size: WorkerSize) -> None:
        self._world = world
        self.worker_id = f"w{number}"
        self.size = size
        self.fingerprint = MODELS[0]
        self.disk = Disk(world, number)
        self.incarnation = 0
        self.model: ModelWorker | None = None
        """Model of the present incarnation, known from its hello."""
        self.epoch: Epoch | None = None
        """Epoch of the current incarnation; None until it is welcomed."""
        self.hello_reason = ev.HelloReason.STARTED
        """Reason of the newest hello."""
        self._is_new = True
        """Whether the next hello is a process's first."""
        self._busy_until = 0.0
        self._last_arrival = 0.0

    @property
    def has_no_room(self) -> bool:
        """Whether the worker's blocks do not hold a prompt token and a generated token."""
        return self.size.num_blocks < 1 or (self.model is not None and self.model.max_context(self.size.num_blocks) < 2)

    # ---------------------------------------------------------------- life

    def boot(self) -> None:
        """Make a new incarnation say hello."""
        self._die(self._world.now)
        self.incarnation += 1
        self._busy_until = self._last_arrival = self._world.now
        self._world.agenda.after(self._world.latency(), self._say_hello, self.incarnation)

    def _say_hello(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return
        self.hello_reason = ev.HelloReason.STARTED if self._is_new else ev.HelloReason.SESSION_LOST
        self._is_new = False
        size = self.size
        peer = f"{self.worker_id}/{self.incarnation}".encode()
        self.model = ModelWorker(
            peer=peer,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            max_rows=size.max_rows,
            max_tokens_per_step=size.max_tokens_per_step,
            max_model_len=size.max_model_len,
            fingerprint=self.fingerprint,
            num_host_blocks=size.num_host_blocks,
            num_disk_blocks=size.num_disk_blocks,
            break_even_context=size.break_even_context,
            state_bytes=self._world.scenario.state_bytes,
            num_checkpoints=self._world.scenario.num_checkpoints,
            num_host_states=self._world.scenario.num_host_states,
            num_kv_groups=self._world.scenario.windows.num_groups,
            window=self._world.scenario.windows.window,
            window_chunk=self._world.scenario.windows.chunk,
            max_draft_tokens=size.max_draft_tokens,
            rng=random.Random(f"drafts of {peer!r}"),
            copy_s=self._world.scenario.pace.copy,
            copies_overlap=self._world.scenario.copies_overlap,
        )
        self.disk.mount(self.model)
        self._world.feed(self.model.hello(self.worker_id, self.hello_reason))

    def welcomed(self, number: int) -> Epoch:
        """Handle an epoch that the core opens."""
        assert self.model is not None
        self.model.welcome(number)
        size, config = self.size, self._world.scenario.config
        num_blocks = size.num_blocks
        if config.max_tokens_in_paged_kv_cache:
            num_blocks = min(num_blocks, max(1, config.max_tokens_in_paged_kv_cache // size.block_size))
        self.model.num_usable = num_blocks
        context = self.model.max_context(num_blocks)
        self.epoch = Epoch(number, self.model.peer, self.worker_id, self.model, context=context)
        self.disk.begin(self.epoch)
        return self.epoch

    def refused(self, size: WorkerSize) -> None:
        """Handle a refusal. The supervisor soon restarts the worker with another size."""
        world = self._world
        self._die(world.now)
        self._is_new = True
        self.size = size
        self._boot_after(world.rng.uniform(0.05, 0.5))

    def handle_unknown(self, peer: ev.Peer) -> None:
        """Handle a message that the core does not know the incarnation, or has dropped it."""
        if self.model is not None and peer == self.model.peer:
            self._boot_after(self._world.latency())

    def lose_scheduler(self, silence_s: float) -> None:
        """Handle the loss of the scheduler. After a while the worker says hello again."""
        self._boot_after(silence_s)

    def _boot_after(self, delay: float) -> None:
        self._world.agenda.after(delay, self._boot_unless_newer, self.incarnation)

    def _boot_unless_newer(self, incarnation: int) -> None:
        if incarnation == self.incarnation:
            self.boot()

    def _die(self, time: float) -> None:
        if self.epoch is not None:
            self.epoch.dead_from = min(self.epoch.dead_from, time)
        self.epoch = None

    def crash(self, *, silent: bool = False, back_after: float | None = None) -> None:
        """Crash the process. Unless `silent`, the core's link soon detects it."""
        world = self._world
        peer = self.model.peer if self.model is not None else None
        self._die(world.now)
        self._is_new = True
        if not silent and peer is not None:
            lost = ev.WorkerLost(worker=peer, reason="its connection is gone")
            world.agenda.after(world.rng.random() * _NOTICE_S, world.feed, lost)
        self._boot_after(world.rng.uniform(0.0, 0.3) if back_after is None else back_after)

    def compile_grammar(self, epoch: Epoch, key: bytes) -> None:
        """Compile a grammar concurrently with the steps and report it, sometimes twice or for an expired epoch."""
        world = self._world
        usable = key != grammar_key(UNUSABLE)
        delay = world.latency() + world.scenario.pace.step * world.rng.uniform(0, 20)
        failure = None if usable else ev.GrammarFailure("empty", is_invalid=True)
        if usable and world.rng.random() < _FAILED_GRAMMARS:
            failure = ev.GrammarFailure("its compiler died", is_invalid=False)
        report = ev.GrammarReported(worker=epoch.peer, epoch=epoch.number, key=key, failure=failure)
        stale = dataclasses.replace(report, epoch=epoch.number - 1)
        reports = world.rng.choice(((report,), (report,), (stale, report), (report, report)))
        for number, each in enumerate(reports):
            world.agenda.after(delay + number * world.latency(), self._report, epoch, each)

    def _report(self, epoch: Epoch, report: ev.GrammarReported) -> None:
        if self._world.now <= epoch.dead_from:
            self._world.feed(report)

    def lives(self, epoch: Epoch) -> bool:
        """Return whether the process in this epoch is alive."""
        return self.epoch is epoch and self._world.now < epoch.dead_from

    # ---------------------------------------------------------------- steps

    def execute(self, epoch: Epoch, plan: Plan) -> list[StreamName]:
        """Execute a plan; return the streams whose rows fail in it, except failures caused by other rows' KV."""
        world, pace = self._world, self._world.scenario.pace
        rates = world.faults
        fault = None
        if rates.per_step and world.rng.random() < rates.per_step:
            fault = world.rng.choice(rates.of_steps)
            self._fail_row(epoch, fault)
        for row in plan.leaves.tolist():
            self.disk.leaves(row, epoch.model)
        answer = epoch.model.execute(plan)
        for admission in plan.admissions:
            self.disk.admitted(epoch.model.rows[admission.row], admission.spec.cache_scope, epoch.model)
        names = tuple(row.name for row in epoch.model.step_rows)
        epoch.in_flight.append(Sent(answer, world.now, names=names))
        if plan.admissions:
            epoch.last_admission = world.now
        failed = []
        for failure in answer.failures:
            if (failure.row, failure.generation) in epoch.failed:
                failed.append(epoch.model.rows[failure.row].name)
            else:
                world.coverage.limit(Limit.INNOCENT)
        jitter = 0.5 + world.rng.random()
        start = max(world.now + pace.latency, self._busy_until)
        num_tokens = plan.num_tokens
        if answer.draft_counts is not None:
            num_tokens += int(answer.draft_counts.sum())
        computing_s = jitter * (pace.step + pace.per_token * num_tokens)
        if epoch.model.copies_overlap:
            answer.copy_delay_s = max(0.0, answer.copy_s - computing_s)
            if answer.copied_blocks:
                world.coverage.limit(Limit.COPIES_OVERLAP)
        end = start + computing_s + answer.copy_delay_s
        if self.epoch is not epoch or start > epoch.dead_from:
            return failed
        if fault is not None:
            changed = self._faulty(epoch, answer, fault, end)
            if changed is None:
                return failed
            answer, end = changed
        self._busy_until = end
        self._send(epoch, answer, end)
        return failed

    def _send(self, epoch: Epoch, answer: ev.StepDone, end: float) -> None:
        self._last_arrival = max(self._last_arrival, end + self._world.latency())
        self._world.agenda.after(self._last_arrival - self._world.now, self._arrive, epoch, answer, end)

    def _arrive(self, epoch: Epoch, answer: ev.StepDone, sent: float) -> None:
        if sent <= epoch.dead_from:
            self._world.feed(answer)

    def _fail_row(self, epoch: Epoch, fault: Fault) -> None:
        if fault in (Fault.FAILED_ROW, Fault.SPOILT_ROW) and epoch.model.rows:
            self._world.fault(fault)
            rows = list(epoch.model.rows.values())
            # Other rows may share the blocks of a prompt that has started.
            row = self._world.rng.choice([row for row in rows if not row.decoding] or rows)
            epoch.model.fail(row.index, spoil=fault is Fault.SPOILT_ROW)
            epoch.failed.add((row.index, row.generation))
            if fault is Fault.SPOILT_ROW:
                epoch.spoilt.append(row.name)

    def _faulty(self, epoch: Epoch, answer: ev.StepDone, fault: Fault, end: float) -> tuple[ev.StepDone, float] | None:
        """Return the result after faults, and its send time; None if it is not sent."""
        world, rng, config = self._world, self._world.rng, self._world.scenario.config
        step = world.scenario.pace.step
        if fault not in (Fault.FAILED_ROW, Fault.SPOILT_ROW):
            world.fault(fault)
        match fault:
            case Fault.LATE_RESULT:
                return answer, end + step * rng.uniform(1, 50)
            case Fault.LOST_RESULT:
                return None
            case Fault.LOST_PLAN:
                # Either the next plan reveals a gap, or the silence makes the worker send another Hello.
                epoch.dead_from = self._busy_until
                self._boot_after(rng.uniform(1, 50) * step)
                return None
            case Fault.DUPLICATE_RESULT:
                self._send(epoch, answer, end)
            case Fault.RESULT_AFTER_RECONNECT:
                self._busy_until = end
                self._send(epoch, answer, end)
                self.epoch = None
                self._boot_after(0.0)
                return None
            case Fault.STALE_EPOCH:
                self._busy_until = end
                self._send(epoch, answer, end)
                world.agenda.after(0.0, self._say_hello, self.incarnation)
                return None
            case Fault.CRASH | Fault.SILENT_CRASH:
                self.crash(silent=fault is Fault.SILENT_CRASH)
                return None
            case Fault.FREEZE:
                return answer, end + config.step_deadline_s * rng.uniform(0.5, 3)
            case Fault.COMPILING:
                expected = rng.uniform(0.1, 2.0)
                world.agenda.after(world.latency(), self._compile, epoch, expected)
                return answer, end + expected * rng.uniform(0.1, 0.9)
            case Fault.GOODBYE:
                self._die(world.now)
                self._is_new = True
                goodbye = ev.WorkerLost(worker=epoch.peer, reason="goodbye", orderly=True)
                world.agenda.after(world.latency(), world.feed, goodbye)
                self._boot_after(rng.uniform(0.0, 0.3))
                return None
            case Fault.RESTART_RESIZED:
                context = world.scenario.traffic.longest_prompt * rng.choice((1, 2))
                self.size = draw_size(rng, config, context)
                self.crash()
                return None
            case Fault.RESTART_OTHER_MODEL:
                self.fingerprint = rng.choice(MODELS)
                self.crash()
                return None
            case Fault.RESTART_IMPOSSIBLE:
                rows = min(self.size.max_rows, config.max_num_seqs)
                few_tokens = dataclasses.replace(self.size, max_tokens_per_step=rows - 1)
                self.size = rng.choice((few_tokens, dataclasses.replace(self.size, num_blocks=0)))
                self.crash()
                return None
            case Fault.UNKNOWN_FAILURE:
                return with_unknown_failure(rng, answer), end
            case Fault.FAILED_ROW | Fault.SPOILT_ROW:
                return answer, end
            case _:
                return malformed(rng, answer, fault), end
        return answer, end

    def _compile(self, epoch: Epoch, expected: float) -> None:
        world = self._world
        stale = world.rng.random() < 0.2
        if not stale:
            epoch.compiling_until = world.now + expected
        event = ev.WorkerCompiling(worker=epoch.peer, epoch=epoch.number - stale, expected_s=expected)
        effects = world.feed(event)
        if [effect for effect in effects if not isinstance(effect, ef.WorkerUnknown)]:
            raise ViolationError("worker.compiling", f"effects {effects}")
