"""All workers as the core sees them: their epochs, and checks on the core's reactions to their results."""

from collections import deque
from collections.abc import Callable

import numpy as np

from checks.sim import disks
from checks.sim.coverage import Limit
from checks.sim.disks import Disk
from checks.sim.faults import Fault
from checks.sim.scenario import draw_size
from checks.sim.sites import Epoch, Site
from checks.sim.world import World
from records.rules.oracle import grammar_key
from records.rules.violation import ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.workers.cost_model import MIN_DEADLINE_S

_EPSILON = 1e-6
_SHORT_DRAIN = 50
"""Longest time of every second drain, in steps."""
_MOST_CHANGES = 1000
"""Maximum number of recorded fleet changes."""


class Cluster:
    """The sites, and the epochs that the core has opened and not ended."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sites = [Site(world, number, size) for number, size in enumerate(world.scenario.workers)]
        self.epochs: dict[ev.Peer, Epoch] = {}
        self.lost: list[Epoch] = []
        """Epochs that ended with the present event."""
        self.longest_step = 0.0
        """The longest time from a plan to its answer, seconds."""
        self._lengths: deque[tuple[float, int, str]] = deque([(world.now, 0, "")], maxlen=_MOST_CHANGES)
        """The longest sequence that a worker open for requests could hold from a time on, and its model."""
        self.wanted: Callable[[], set[str]] = set
        """Returns the models required by live requests; includes "" if a request requires no particular model."""
        self._drained: set[str] = set()
        """Workers that were drained when they were lost. They are still drained after they reconnect."""
        self._served = ""
        """Fingerprint of the model that was served last."""
        self._known = ""
        """The same, as the present core knows it."""
        self.unusable = b""
        """Key of the grammar that a worker has just reported as impossible to compile, after a question."""
        self._expectation = ""
        """Expected outcome of the core's current event."""

    @property
    def usable(self) -> list[Epoch]:
        """The workers that are open for requests."""
        return [epoch for epoch in self.epochs.values() if not epoch.draining]

    def longest(self) -> int:
        """Return the longest sequence that a worker open for requests can hold; 0 without such a worker."""
        return self._lengths[-1][1]

    def longest_since(self, time: float, model: str = "") -> int:
        """Return the longest sequence that an open worker could hold for this model at any time since `time`."""
        longest = 0
        for since, length, served in reversed(self._lengths):
            if model in ("", served):
                longest = max(longest, length)
            if since <= time:
                break
        return longest

    @property
    def empty_since(self) -> float:
        """Time of the last change to `longest`, or when the last open worker left."""
        return self._lengths[-1][0]

    def _fleet_changed(self) -> None:
        """Record which workers are open for requests, after a possible change."""
        longest = max((epoch.context for epoch in self.usable), default=0)
        if (longest, self._served) != self._lengths[-1][1:]:
            self._lengths.append((self._world.now, longest, self._served))

    def start(self) -> None:
        """Start all workers at almost the same time."""
        for site in self.sites:
            self._world.agenda.after(self._world.rng.random() * 0.1, site.boot)

    # ---------------------------------------------------------------- events

    def before(self, event: ev.Event) -> None:
        """Record the expected outcome of an event about workers."""
        if self.lost:
            self.lost = []
        match event:
            case ev.StepDone():
                self._expectation = self._expect(event)
            case ev.WorkerLost():
                self._lose(event.worker)
            case ev.WorkerHello():
                self._lose(event.worker)
            case ev.GrammarReported():
                self._grammar_reported(event)
            case ev.DiskReported():
                epoch = self.epochs.get(event.worker)
                if epoch is not None and epoch.number == event.epoch:
                    disks.ended(epoch, event)
            case ev.DrainRequested():
                for epoch in self.usable:
                    if epoch.worker_id == event.worker_id:
                        epoch.draining = True
                        self._fleet_changed()
            case ev.ResumeRequested():
                for epoch in self.epochs.values():
                    epoch.draining &= epoch.worker_id != event.worker_id
                self._drained.discard(event.worker_id)
                self._fleet_changed()

    def _grammar_reported(self, event: ev.GrammarReported) -> None:
        epoch = self.epochs.get(event.worker)
        self.unusable = b""
        if epoch is not None and epoch.number == event.epoch and event.key in epoch.asked:
            epoch.asked.remove(event.key)
            if event.failure is not None:
                epoch.cannot.add(event.key)
                self.unusable = event.key if event.failure.is_invalid else b""
            else:
                epoch.compiled.add(event.key)

    def _expect(self, event: ev.StepDone) -> str:
        epoch = self.epochs.get(event.worker)
        if epoch is None:
            return "unknown"
        if epoch.number != event.epoch:
            return "stale"
        sound = epoch.in_flight[0].answer if epoch.in_flight else None
        if sound is None or (sound.step, tuple(sound.completed_copies)) != (
            event.step,
            tuple(event.completed_copies),
        ):
            return "wrong"
        # A corrupted result may by chance equal the correct one. The core cannot detect that.
        for name in ("rows", "tokens", "counts", "draft_counts"):
            of_sound, of_event = getattr(sound, name), getattr(event, name)
            if of_sound is not of_event and not np.array_equal(of_sound, of_event):
                return "wrong"
        sent = epoch.in_flight.popleft()
        epoch.answered_at = self._world.now
        self.longest_step = max(self.longest_step, self._world.now - sent.time)
        epoch.model.answered_step = event.step
        return "sound"

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Check the outcome of the event."""
        match event:
            case ev.StepDone():
                self._check_answer(event, effects)
            case ev.TimePassed():
                self._check_overdue()

    def _check_answer(self, event: ev.StepDone, effects: list[ef.Effect]) -> None:
        unknown = ef.WorkerUnknown(worker=event.worker) in [e for e in effects if isinstance(e, ef.WorkerUnknown)]
        believed = any(isinstance(effect, ef.TokensReady) for effect in effects)
        match self._expectation:
            case "unknown" if len(effects) != 1 or not unknown:
                raise ViolationError("worker.unknown", f"effects {effects} of a stranger's answer")
            case "stale" if effects:
                raise ViolationError("worker.stale", f"effects {effects} of an answer of an epoch that is over")
            case "wrong" if believed or not unknown:
                raise ViolationError("worker.wrong", f"an result of step {event.step} that does not fit was believed")
            case "sound" if unknown:
                raise ViolationError("worker.sound", f"a sound result of step {event.step} was not believed")

    def _check_overdue(self) -> None:
        """Check that no worker lives past the longest deadline of its step."""
        now, ceiling = self._world.now, self._world.scenario.config.step_deadline_s
        for epoch in self.epochs.values():
            if epoch.in_flight:
                oldest = epoch.in_flight[0]
                # A plan that was sent early starts when its predecessor's result arrives.
                started = max(oldest.time, epoch.answered_at)
                longest = max(started + ceiling + oldest.excused, epoch.compiling_until)
                if now > longest + _EPSILON:
                    age = now - oldest.time
                    what = f"step {oldest.answer.step} of {epoch.peer!r} is {age:.2f} s old"
                    self._world.broken("worker.overdue", what)

    def excuse(self, jump: float) -> None:
        """Extend the deadlines, because the scheduler was blocked."""
        for epoch in self.epochs.values():
            for sent in epoch.in_flight:
                sent.excused += jump

    # ---------------------------------------------------------------- effects

    def welcomed(self, effect: ef.WorkerWelcomed) -> None:
        """Handle an epoch that the core opens."""
        site = self._site(effect.worker)
        fingerprint = site.fingerprint
        if any(epoch.model.fingerprint != fingerprint for epoch in self.epochs.values()):
            raise ViolationError("worker.model", f"{effect.worker!r} serves another model than the others")
        if self._served not in ("", fingerprint):
            self._world.coverage.limit(Limit.MODEL)
        self._served = self._known = fingerprint
        epoch = self.epochs[effect.worker] = site.welcomed(effect.epoch)
        # A new process replaces a drained one, and is not drained.
        epoch.draining = site.worker_id in self._drained and site.hello_reason is not ev.HelloReason.STARTED
        self._drained.discard(site.worker_id)
        self._fleet_changed()

    def grammar_wanted(self, effect: ef.GrammarWanted) -> None:
        """Check that the core asks a worker for a grammar once, and only if the worker does not have it."""
        epoch = self.epochs[effect.worker]
        if effect.epoch != epoch.number or effect.key != grammar_key(effect.grammar):
            raise ViolationError("grammar.wanted", f"{effect} in epoch {epoch.number}")
        if effect.key in epoch.asked | epoch.compiled:
            raise ViolationError("grammar.wanted", f"{effect.grammar!r} is wanted twice of {effect.worker!r}")
        if not epoch.compiled.issuperset(effect.drop):
            raise ViolationError("grammar.drop", f"{effect.worker!r} has not compiled all of {effect.drop}")
        epoch.compiled.difference_update(effect.drop)
        epoch.asked.add(effect.key)
        self._site(effect.worker).compile_grammar(epoch, effect.key)

    def disk_job_wanted(self, effect: ef.DiskJobWanted) -> None:
        """Pass a job to the worker's disk."""
        epoch = self.epochs[effect.worker]
        if effect.epoch != epoch.number:
            raise ViolationError("disk.job", f"{effect} in epoch {epoch.number}")
        self._site(effect.worker).disk.ordered(epoch, effect.job)

    def disk_of(self, epoch: Epoch) -> Disk:
        """Return the disk of a worker."""
        return self._site(epoch.peer).disk

    def refused(self, effect: ef.WorkerRefused) -> None:
        """Handle a refusal by the core; the worker restarts with values that the core accepts."""
        world, site = self._world, self._site(effect.worker)
        rows = min(site.size.max_rows, world.scenario.config.max_num_seqs)
        impossible = site.has_no_room or site.size.max_tokens_per_step < rows
        wanted = {model or self._known for model in self.wanted()} - {""}
        is_alone = all(epoch.worker_id == site.worker_id for epoch in self.epochs.values())
        is_unwanted = is_alone and bool(wanted) and site.fingerprint not in wanted
        if not impossible and site.fingerprint == self._served and not is_unwanted:
            raise ViolationError("worker.refused", f"{effect.worker!r}: {effect.reason}")
        site.fingerprint = world.rng.choice(sorted(wanted)) if is_unwanted else self._served or site.fingerprint
        context = world.scenario.traffic.context
        site.refused(draw_size(world.rng, world.scenario.config, context) if impossible else site.size)

    def unknown(self, effect: ef.WorkerUnknown, cause: ev.Event) -> None:
        """Handle a worker that the core does not know, or removes."""
        epoch = self.epochs.get(effect.worker)
        if epoch is not None:
            if isinstance(cause, ev.TimePassed):
                self._check_blame(epoch)
            self._lose(effect.worker)
        site = self._site(effect.worker)
        site.handle_unknown(effect.worker)

    def _check_blame(self, epoch: Epoch) -> None:
        """Check that no worker is removed before the shortest deadline, or while the scheduler was blocked."""
        oldest = epoch.in_flight[0] if epoch.in_flight else None
        shortest = min(self._world.scenario.config.step_deadline_s, MIN_DEADLINE_S)
        # A plan that was sent early starts when its predecessor's result arrives.
        if oldest is None or self._world.now < max(oldest.time, epoch.answered_at) + shortest - _EPSILON:
            raise ViolationError("worker.blamed", f"{epoch.peer!r} was given up too early")
        if self._world.now < oldest.time + shortest + oldest.excused - _EPSILON:
            raise ViolationError("worker.blamed", f"{epoch.peer!r} was given up too early")
        if self._world.now < epoch.compiling_until - _EPSILON:
            raise ViolationError("worker.blamed", f"{epoch.peer!r} was given up while it compiled")

    def _site(self, peer: ev.Peer) -> Site:
        worker_id = peer.split(b"/")[0].decode()
        return next(site for site in self.sites if site.worker_id == worker_id)

    def _lose(self, peer: ev.Peer) -> None:
        epoch = self.epochs.pop(peer, None)
        if epoch is None:
            return
        epoch.is_lost = True
        if epoch.draining:
            self._drained.add(epoch.worker_id)
        self.lost.append(epoch)
        self._fleet_changed()

    # ---------------------------------------------------------------- faults and healing

    def crash_one(self) -> None:
        """Crash one worker, in any state."""
        self._world.fault(Fault.IDLE_CRASH)
        self._world.rng.choice(self.sites).crash(silent=self._world.rng.random() < 0.3)

    def drain_one(self) -> None:
        """Drain one worker, and resume it later."""
        world = self._world
        world.fault(Fault.DRAIN)
        worker_id = world.rng.choice([*(site.worker_id for site in self.sites), "nobody"])
        world.feed(ev.DrainRequested(worker_id=worker_id, move=world.rng.random() < 0.5))
        longest_s = world.rng.choice((1.0, _SHORT_DRAIN * world.scenario.pace.step))
        world.agenda.after(longest_s * world.rng.random(), world.feed, ev.ResumeRequested(worker_id=worker_id))

    def core_died(self) -> None:
        """End all epochs. Workers detect this when they send a message, or by silence."""
        for epoch in self.epochs.values():
            epoch.is_lost = True
        self.epochs.clear()
        self._drained.clear()
        self._known = ""
        self._fleet_changed()
        for site in self.sites:
            site.lose_scheduler(self._world.rng.uniform(0.05, 1.0))

    def heal(self) -> None:
        """Restart every worker that does not serve, with values that the core accepts."""
        world = self._world
        for site in self.sites:
            rows = min(site.size.max_rows, world.scenario.config.max_num_seqs)
            if site.has_no_room or site.size.max_tokens_per_step < rows:
                site.size = draw_size(world.rng, world.scenario.config, world.scenario.traffic.context)
            if site.epoch is None or site.epoch.dead_from <= world.now or site.model is None:
                site.fingerprint = self._served or site.fingerprint
                site.boot()
            world.feed(ev.ResumeRequested(worker_id=site.worker_id))
