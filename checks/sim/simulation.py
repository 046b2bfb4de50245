"""One simulation of the production core through its public methods, with a scenario generated from one seed.

The loop matches the scheduler service: handle arrived events, advance time, and plan for every worker whose plan is
due. Phase one injects faults. Phase two repairs everything and requires that every request ends within a time limit.
Every error becomes a `Failure`, with the event that caused it and the history of the affected request.
"""

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checks.sim import twins, wire
from checks.sim.agenda import Agenda
from checks.sim.clients import Clients
from checks.sim.cluster import Cluster
from checks.sim.coverage import Coverage
from checks.sim.faults import NONE, Fault
from checks.sim.promises.watch import Promises
from checks.sim.returns import Returns
from checks.sim.scenario import Scenario
from checks.sim.sites import Epoch, Site
from checks.sim.stream import Stream
from checks.sim.watchdog import HangError, Watchdog
from checks.sim.world import World
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers.fleet import OWN_STALL_S
from scheduler_svc.core.workers.quarantine import FATAL_ALONE, FATAL_STEPS

_MOST_ACTS = 256
_MOST_PLANS = 8
_TURNS_PER_STEP = 5
"""Maximum number of turns per step in the phase with faults, even if the core got fewer events."""
_LINKS_SHARE = 0.25
_MOST_TURNS_AT_ONCE = 10_000
"""Maximum number of turns without progress in virtual time."""
_SHORT = 300
"""In runs of at most this many steps, the core's internal invariants are checked after every event."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A simulation that found an error."""

    check: str
    detail: str
    event: str
    """Last event that the core got."""
    num_events: int
    request: StreamName | None
    story: list[tuple[float, str]]
    trace: str
    """The traceback."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a simulation."""

    seed: int
    num_events: int
    """Number of calls to `handle`, without those that only advanced the time and had no effect."""
    num_plans: int
    failure: Failure | None


Log = Callable[[float, ev.Event | ef.Effect | Plan], None]


class Simulation:
    """Runs a scenario once.

    Args:
        scenario: the scenario.
        coverage: the counts to update.
        log: called with every event, effect and plan, with its time.
        make_core: makes a core from its configuration and incarnation.
    """

    def __init__(
        self,
        scenario: Scenario,
        coverage: Coverage,
        log: Log | None = None,
        make_core: Callable[[CoreConfig, int], Scheduler] = Scheduler,
    ) -> None:
        coverage.scenario(scenario.config)
        self._make_core = make_core
        self._scenario = scenario
        self._log = log
        self._agenda = Agenda(now=1000.0)
        rng = random.Random(f"world {scenario.seed}")
        self._world = World(scenario, rng, self._agenda, coverage, self.feed, scenario.faults)
        self._cluster = Cluster(self._world)
        self._clients = Clients(self._world, self._stream_began, self._stream_ended)
        self._cluster.wanted = lambda: {each.demand.model for each in self._clients.live.values() if each.known}
        self._returns = Returns(self._world, self._clients)
        self._core = make_core(scenario.config, rng.getrandbits(63))
        self._promises = self._watch()
        self._next_tick = self._agenda.now
        self._last_time = self._agenda.now
        self._watchdog = Watchdog()
        self._turn_time, self._turns_at_once = self._agenda.now, 0
        """Time of the last turn, and the number of turns at this time."""
        self._event: ev.Event = ev.TimePassed()
        self._check_every = scenario.check_every
        self._was_fed = False
        """Whether the core has received an event since its last plan."""
        self._has_links = random.Random(f"links of {scenario.seed}").random() < _LINKS_SHARE
        """Whether messages go through the codecs of the links."""
        self.num_events = 0
        self.num_plans = 0
        self._carry_out: dict[type, Callable[[Any], None]] = {
            ef.TokensReady: self._clients.tokens_ready,
            ef.RequestEnded: self._request_ended,
            ef.ServiceChanged: self._clients.service_changed,
            ef.FrontendUnknown: lambda effect: None,
            ef.WorkerWelcomed: self._cluster.welcomed,
            ef.WorkerRefused: self._cluster.refused,
            ef.WorkerUnknown: lambda effect: self._cluster.unknown(effect, self._event),
            ef.WorkerEmptied: lambda effect: None,
            ef.GrammarWanted: self._cluster.grammar_wanted,
            ef.DiskJobWanted: self._cluster.disk_job_wanted,
            ef.ScoresReady: self._clients.scores_ready,
            ef.ResumeAnswered: self._returns.answered,
            ef.LogBegun: self._returns.log_begun,
            ef.LogEnded: self._returns.log_ended,
            ef.LogDropped: self._returns.log_dropped,
            ef.AttemptPrefilled: lambda effect: None,
            ef.AttemptEnded: lambda effect: self._promises.attempt_ended(effect),
        }

    def run(self, steps: int) -> Result:
        """Run both phases; the first lasts until the core got `steps` events."""
        failure = None
        if steps <= _SHORT:
            self._check_every = 1
        try:
            with self._watchdog:
                self._run_phases(steps)
        except Exception as error:  # Treat any exception as a failure.
            failure = self._explain(error)
        finally:
            self._returns.close()
        return Result(self._scenario.seed, self.num_events, self.num_plans, failure)

    def _run_phases(self, steps: int) -> None:
        if self._scenario.compares:
            for compare in (twins.check_purpose, twins.check_backlog):
                self._watchdog.step_begins()
                compare(self._scenario.seed)
        self._clients.start()
        self._cluster.start()
        self._schedule_disaster()
        turns = 0
        while self.num_events < steps and turns < _TURNS_PER_STEP * steps:
            self._turn()
            turns += 1
        self._heal_and_finish()

    def _watch(self) -> Promises:
        return Promises(self._world, self._cluster, self._clients, self._core)

    # ---------------------------------------------------------------- the loop

    def _turn(self) -> None:
        self._watchdog.step_begins()
        agenda, core = self._agenda, self._core
        wake = self._next_tick
        due = core.next_plan_due(agenda.now)
        for time in (agenda.next_time(), due):
            if time is not None and time < wake:
                wake = time
        pause = self._scenario.pace.turn * self._world.rng.random() if self._scenario.pace.turn else 0.0
        agenda.now = max(agenda.now, wake) + pause
        self._turns_at_once = self._turns_at_once + 1 if agenda.now == self._turn_time else 0
        self._turn_time = agenda.now
        if self._turns_at_once > _MOST_TURNS_AT_ONCE:
            raise ViolationError("hang", f"{self._turns_at_once} turns at {agenda.now:.6f}; the time does not pass")
        agenda.run_due(_MOST_ACTS)
        if agenda.now >= self._next_tick:
            self._next_tick = agenda.now + self._scenario.pace.tick
            self.feed(ev.TimePassed())
        if self._was_fed or (due is not None and due <= agenda.now):
            self._plan()

    def feed(self, event: ev.Event) -> list[ef.Effect]:
        """Pass one event to the core; execute and check the effects, then return them."""
        agenda = self._agenda
        self._event = event
        self._was_fed = True
        kind = type(event)
        self._world.coverage.counts["event", kind.__name__] += 1
        jump = agenda.now - self._last_time
        if jump > OWN_STALL_S:
            self._cluster.excuse(jump)
        self._last_time = agenda.now
        self._cluster.before(event)
        self._promises.before(event)
        if self._has_links:
            event = wire.received(event, agenda.now)
        effects = self._core.handle(event, agenda.now)
        if effects or kind is not ev.TimePassed:
            self.num_events += 1
        if self._log is not None:
            self._log(agenda.now, event)
        self._receive(effects)
        self._cluster.after(event, effects)
        self._promises.after(event, effects)
        if kind is ev.TimePassed:
            self._clients.check_deadlines()
        if self.num_events % self._check_every == 0:
            self._core.validate()
        return effects

    def _receive(self, effects: list[ef.Effect]) -> None:
        counts = self._world.coverage.counts
        for effect in effects:
            kind = type(effect)
            counts["effect", kind.__name__] += 1
            if self._log is not None:
                self._log(self._agenda.now, effect)
            self._carry_out[kind](wire.delivered(effect) if self._has_links else effect)
        self._returns.note(effects)
        self._clients.check_ends()

    def _request_ended(self, effect: ef.RequestEnded) -> None:
        self._world.coverage.counts["end", effect.reason.name] += 1
        self._clients.request_ended(effect, self._promises.objection)

    def _stream_began(self, stream: Stream) -> None:
        self._returns.began(stream)

    def _stream_ended(self, stream: Stream) -> None:
        self._promises.ended(stream)

    def _plan(self) -> None:
        self._was_fed = False
        core, epochs = self._core, self._cluster.epochs
        peers = core.workers()
        if set(peers) != epochs.keys():
            raise ViolationError("worker.set", f"the core plans for {peers}, known are {list(epochs)}")
        for peer in peers:
            for _ in range(_MOST_PLANS):
                self._promises.asked(epochs[peer])
                plan, effects = core.plan(peer, self._agenda.now)
                if effects:
                    self._receive(effects)
                if plan is None:
                    if not effects and not epochs[peer].in_flight:
                        self._promises.no_plan(epochs[peer])
                    break
                # The core may clean up right after a plan or with the next event. Both must give equal results.
                if self.num_plans % 2:
                    core.tidy()
                self._execute(plan)

    def _execute(self, plan: Plan) -> None:
        self.num_plans += 1
        if self._has_links:
            plan = wire.planned(plan)
        if self._log is not None:
            self._log(self._agenda.now, plan)
        epoch = self._cluster.epochs[plan.worker]
        site = next(site for site in self._cluster.sites if site.worker_id == epoch.worker_id)
        for name in site.execute(epoch, plan):
            stream = self._clients.live.get(name)
            if stream is not None:
                stream.row_failed = True
        self._poison(site, epoch, plan)
        while epoch.spoilt:
            # The fault affects another request only if that request is about to reuse this KV.
            self._agenda.after(self._world.latency(), self._clients.follow, epoch.spoilt.pop())
        self._promises.plan_made(plan, epoch)

    def _poison(self, site: Site, epoch: Epoch, plan: Plan) -> None:
        """Kill the worker if its step contains a request that kills workers."""
        if not self._scenario.faults.of_requests.get(Fault.POISON) or not site.lives(epoch):
            return
        for row in epoch.model.step_rows:
            stream = self._clients.live.get(row.name)
            if stream is None or stream.demand.poison_at is None:
                continue
            if len(row.tokens) - len(stream.demand.prompt) < stream.demand.poison_at:
                continue
            self._world.fault(Fault.POISON)
            stream.killed_workers += 1
            # Other faults may hit the same worker at the same time, and the core may attribute the death to them.
            if stream.killed_workers > 2 * (FATAL_STEPS + FATAL_ALONE):
                raise ViolationError("poison", f"{stream.killed_workers} workers killed", stream.name)
            site.crash(silent=self._world.rng.random() < 0.2)
            return

    # ---------------------------------------------------------------- faults at any time

    def _schedule_disaster(self) -> None:
        faults = self._world.faults
        if faults.per_s:
            self._agenda.after(self._world.rng.expovariate(faults.per_s), self._disaster)

    def _disaster(self) -> None:
        world = self._world
        if world.healed:
            return
        self._schedule_disaster()
        fault = world.rng.choice(world.faults.timed)
        match fault:
            case Fault.SCHEDULER_STALL:
                world.fault(fault)
                seconds = world.rng.uniform(0.1, 5.0)
                self._agenda.now += seconds
                world.stalled_s += seconds
            case Fault.CORE_RESTART:
                world.fault(fault)
                self._restart_core()
            case Fault.SHUTDOWN:
                world.fault(fault)
                self._promises.shutting_down()
                self.feed(ev.ShutdownRequested())
                for stream in self._clients.live.values():
                    if stream.known:
                        raise ViolationError("shutdown", "a request outlives the shutdown", stream.name)
                self._restart_core()
            case Fault.FRONTEND_LOST:
                self._clients.lose_one()
            case Fault.IDLE_CRASH:
                self._cluster.crash_one()
            case Fault.UNKNOWN_STREAM:
                self._clients.send_unknown_streams()
            case Fault.UNKNOWN_FRONTEND:
                self._clients.send_from_unknown_frontend()
            case Fault.DRAIN:
                self._cluster.drain_one()

    def _restart_core(self) -> None:
        self._core.validate()
        self._core = self._make_core(self._scenario.config, self._world.rng.getrandbits(63))
        self._promises = self._watch()
        self._cluster.core_died()
        self._returns.core_died()
        self._clients.core_died()

    # ---------------------------------------------------------------- phase two

    def _heal_and_finish(self) -> None:
        world, agenda = self._world, self._agenda
        world.healed = True
        world.faults = NONE
        self._cluster.heal()
        self._clients.heal()
        bound = agenda.now + self._bound()
        while self._clients.live:
            self._turn()
            if agenda.now > bound:
                name, stream = next(iter(self._clients.live.items()))
                state = f"{len(stream.tokens)} of {stream.demand.max_tokens} tokens"
                raise ViolationError("finish", f"{len(self._clients.live)} requests do not end; one has {state}", name)
        while any(epoch.in_flight for epoch in self._cluster.epochs.values()):
            self._turn()
            if agenda.now > bound:
                raise ViolationError("finish", "the answer to a step does not arrive")
        self._check_empty()

    def _bound(self) -> float:
        """Return the time limit in seconds for everything to end: one token per step, plus every limit on waits."""
        pace, config = self._scenario.pace, self._scenario.config
        tokens = sum(s.num_known + s.demand.max_tokens - len(s.tokens) for s in self._clients.live.values())
        step = 2 * (pace.step + pace.per_token * config.max_num_batched_tokens + pace.latency + pace.turn) + pace.tick
        waits = config.stall_timeout_s + config.worker_wait_s + 4 * config.step_deadline_s
        batches = len(self._clients.live) * config.batching.max_wait_s
        rates = [each.tokens_per_s for each in config.tenant_limits.values() if each.tokens_per_s]
        quotas = tokens / min([50.0, *rates])
        return 60.0 + waits + batches + 4 * tokens * step + quotas

    def _check_empty(self) -> None:
        self._core.validate()
        stats = self._core.stats()
        if stats.running or stats.waiting:
            raise ViolationError("empty", f"{stats.running} run and {stats.waiting} wait although all have ended")
        for worker in stats.workers:
            if worker.blocks_free + worker.blocks_cached != worker.blocks_total:
                raise ViolationError(
                    "empty", f"{worker.blocks_held} blocks of {worker.worker_id} are held by no request"
                )
            if worker.host_blocks_held:
                raise ViolationError("empty", f"{worker.host_blocks_held} host blocks of {worker.worker_id} are held")
        self.feed(ev.TimePassed())
        self._promises.at_rest()

    def _explain(self, error: Exception) -> Failure:
        violated = isinstance(error, ViolationError)
        name = error.stream if isinstance(error, ViolationError) else None
        story = []
        if name is not None:
            found = self._core.story(name.frontend, name.stream)
            story = [] if found is None else found.events
            stream = self._clients.find(name)
            if stream is not None and stream.end is not None:
                story.append((stream.last_move, f"last heard of by its client; ended {stream.end.name}"))
        check = "hang" if isinstance(error, HangError) else "core"
        return Failure(
            check=error.check if isinstance(error, ViolationError) else check,
            detail=error.detail if isinstance(error, ViolationError) else f"{type(error).__name__}: {error}",
            event=repr(self._event)[:1000],
            num_events=self.num_events,
            request=name,
            story=story,
            trace="" if violated else "".join(traceback.format_exception(error)),
        )
