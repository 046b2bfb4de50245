"""What the core promises about requests, plans and limits, checked from outside as things happen.

`placed`, the waiting room and everything that rests on them need to know of every preemption. The core tells of those
for traced requests; so these checks are made in simulations whose requests are all traced (`omniscient`).
"""

from collections.abc import Callable

from scheduler_svc.core import effects as ef
from scheduler_svc.core import events as ev
from scheduler_svc.core.plan import Plan, RowAdmission
from scheduler_svc.core.records import EndReason
from scheduler_svc.core.stats import SchedulerStats
from scheduler_svc.core.suspicion import FATAL_ALONE, FATAL_STEPS
from scheduler_svc.sim.clients import Clients
from scheduler_svc.sim.cluster import Cluster
from scheduler_svc.sim.coverage import Limit
from scheduler_svc.sim.model_worker import ModelWorker
from scheduler_svc.sim.oracle import grammar_key
from scheduler_svc.sim.order import WaitingRoom
from scheduler_svc.sim.sites import Epoch
from scheduler_svc.sim.stream import Stream
from scheduler_svc.sim.traffic import UNUSABLE
from scheduler_svc.sim.violation import StreamName, ViolationError
from scheduler_svc.sim.world import World

_ENDS = frozenset(reason.value for reason in EndReason)


class Promises:
    """Watches one core from its birth on."""

    def __init__(self, world: World, cluster: Cluster, clients: Clients) -> None:
        self._world = world
        self._config = world.scenario.config
        self._cluster = cluster
        self._clients = clients
        self._omniscient = world.scenario.traffic.traced == 1.0
        self.waiting = WaitingRoom(world)
        self.shutting_down = False
        self._num_waiting = 0
        """Requests that waited before the present event."""
        self._last_tick = self._regular_since = world.now
        """Since when time has passed without long breaks: waits are measured in the core's own ticks."""

    # ---------------------------------------------------------------- requests

    def queue_has(self, num_waiting: int) -> None:
        """So many requests wait before the present event."""
        self._num_waiting = num_waiting

    def after(self, event: ev.Event) -> None:
        """Takes note of requests that have begun to wait."""
        match event:
            case ev.RequestArrived():
                stream = self._live(event.frontend, event.stream)
                if stream is not None and not self.waiting.knows(stream):
                    # Who takes a request over makes room by ending the other one first.
                    if self._num_waiting >= self._config.max_queued_requests + event.again:
                        raise ViolationError("limit.queue", f"{self._num_waiting} wait already", stream.name)
                    most = self._most_queued(stream)
                    if most and self._omniscient and self._num_queued_beside(stream) >= most + event.again:
                        raise ViolationError("limit.tenant_queue", f"{most} of its tenant wait already", stream.name)
                    self.waiting.arrive(stream)
                    self._wait(stream)
            case ev.CreditGranted():
                stream = self._live(event.frontend, event.stream)
                if stream is not None and stream.placed is None:
                    self._wait(stream)
            case ev.GrammarReported() if self._cluster.unusable:
                self._check_unusable(self._cluster.unusable)
            case ev.TimePassed():
                self._check_waits()

    def _check_unusable(self, key: bytes) -> None:
        """A grammar that cannot be compiled ends everybody who has it."""
        for stream in self._clients.live.values():
            if stream.known and grammar_key(stream.demand.grammar) == key:
                raise ViolationError("grammar.unusable", f"it goes on with {stream.demand.grammar!r}", stream.name)

    def _check_waits(self) -> None:
        """Nobody waits for a worker, or for a reader, longer than is said."""
        config, now, cluster = self._config, self._world.now, self._cluster
        # Each is noticed when time passes, and acted upon when it passes again.
        patience = 2 * self._world.scenario.pace.tick + self._world.scenario.pace.turn
        if now - self._last_tick > patience:
            self._regular_since = now
        self._last_tick = now
        if not cluster.usable and self._omniscient:
            for stream in self.waiting.streams():
                since = max(cluster.empty_since, stream.arrival, self._regular_since)
                if stream.known and now - since > config.worker_wait_s + patience:
                    raise ViolationError("wait.worker", f"waits for a worker since {since:.3f}", stream.name)
        if config.stall_timeout_s:
            for stream in self._clients.live.values():
                since = max(stream.last_move, self._regular_since)
                idle = stream.starved and stream.known and (stream.placed is None or stream.tokens)
                if (
                    idle
                    and self._omniscient
                    and now - since > config.stall_timeout_s + config.step_deadline_s + patience
                ):
                    raise ViolationError("wait.reader", f"its reader stalls since {since:.3f}", stream.name)

    def _most_queued(self, stream: Stream) -> int:
        limits = self._config.tenant_limits
        tenant = limits.get(stream.demand.tenant, limits.get(""))
        return tenant.max_queued if tenant is not None else 0

    def _num_queued_beside(self, stream: Stream) -> int:
        """Others of its tenant that wait."""
        others = (other for other in self._clients.live.values() if other is not stream and other.known)
        return sum(other.placed is None and other.demand.tenant == stream.demand.tenant for other in others)

    def _live(self, frontend: ev.Peer, number: int) -> Stream | None:
        return self._clients.live.get(StreamName(frontend, number))

    def _wait(self, stream: Stream) -> None:
        if not stream.starved:
            self.waiting.wait(stream)

    def attempt_ended(self, effect: ef.AttemptEnded) -> None:
        """A traced request left its worker."""
        stream = self._live(effect.frontend, effect.stream)
        if stream is None:
            raise ViolationError("attempt.unknown", f"{effect.outcome} of stream {effect.stream}, which is not live")
        self._must_leave(stream)
        if effect.outcome in _ENDS:
            return
        stream.preemptions += 1
        epoch = self._cluster.epochs.get(stream.placed) if stream.placed is not None else None
        if epoch is not None and epoch.in_flight:
            stream.unsettled_until = (epoch.number, epoch.in_flight[-1].answer.step)
        if effect.outcome == "preempted":
            self._preempted(stream, epoch)
        stream.placed = None
        if self._omniscient:
            self._wait(stream)

    def _preempted(self, stream: Stream, epoch: Epoch | None) -> None:
        self._world.coverage.limit(Limit.MEMORY)
        if epoch is not None:
            epoch.preempted = True
        if self._config.capacity == "guaranteed_no_evict":
            raise ViolationError("capacity.guaranteed", "preempted", stream.name)
        if stream.preempted_at == len(stream.tokens):
            self._world.broken("preempt.progress", f"twice at {len(stream.tokens)} tokens", stream.name)
        stream.preempted_at = len(stream.tokens)

    def ended(self, stream: Stream) -> None:
        """A stream is over."""
        self._must_leave(stream)
        self.waiting.forget(stream)

    def _must_leave(self, stream: Stream) -> None:
        epoch = self._cluster.epochs.get(stream.placed) if stream.placed is not None else None
        if epoch is not None and stream.row is not None:
            epoch.must_leave.append((*stream.row, stream.name))
        stream.row = None

    def objection(self, stream: Stream, reason: EndReason) -> str | None:
        """What speaks against the reason of an end, as far as it depends on more than the stream."""
        now, config = self._world.now, self._config
        match reason:
            case EndReason.CANCELLED:
                return None if stream.cancel_sent else "nobody cancelled it"
            case EndReason.DEADLINE:
                passed = stream.deadline is not None and now >= stream.deadline
                targets = stream.deadline, stream.ttft_deadline, stream.total_deadline
                early = (
                    config.policy_of(stream.demand.tenant) == "edf"
                    and not stream.placements
                    and any(t is not None for t in targets)
                )
                early |= stream.deadline is not None and not stream.placements
                return None if passed or early else "its time was not up"
            case EndReason.QUEUE_FULL:
                most = self._most_queued(stream)
                full = self._num_waiting >= config.max_queued_requests or config.max_queued_tokens < 1 << 24
                if not full and not (most and (not self._omniscient or self._num_queued_beside(stream) >= most)):
                    return f"only {self._num_waiting} were waiting"
                self._world.coverage.limit(Limit.QUEUE)
            case EndReason.INVALID:
                if stream.demand.grammar == UNUSABLE:
                    return None
                if stream.demand.valid and (stream.tokens or stream.num_known < self._cluster.longest()):
                    return "it is valid"
            case EndReason.LENGTH:
                full = stream.num_known == stream.context or stream.num_known >= self._cluster.longest()
                if len(stream.tokens) < stream.demand.max_tokens and not full:
                    return f"{len(stream.tokens)} of {stream.demand.max_tokens} tokens"
            case EndReason.NO_WORKER:
                missing = now - max(self._cluster.empty_since, stream.arrival)
                if self._cluster.usable or missing < config.worker_wait_s:
                    return "a worker was there"
            case EndReason.STALLED:
                if not config.stall_timeout_s or not stream.starved or now - stream.last_move < config.stall_timeout_s:
                    return "its reader was not stalled"
            case EndReason.POISON:
                # It may have been innocent and unlucky four times, which the core cannot know.
                if stream.demand.traced and stream.preemptions < FATAL_STEPS + FATAL_ALONE:
                    return f"it was moved away from {stream.preemptions} workers only"
            case EndReason.SHUTDOWN:
                return None if self.shutting_down else "nobody asked for it"
        return None

    # ---------------------------------------------------------------- plans

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        """A plan was executed by the model: limits, admissions and leaves."""
        config, coverage, model = self._config, self._world.coverage, epoch.model
        most_rows = min(config.max_num_seqs, model.max_rows)
        if config.batching.mode != "continuous":
            most_rows = min(most_rows, config.batching.max_batch_size)
        if len(model.rows) > most_rows:
            raise ViolationError("limit.rows", f"{len(model.rows)} rows of at most {most_rows}")
        most_tokens = min(config.max_num_batched_tokens, model.max_tokens_per_step)
        if plan.num_tokens > most_tokens:
            raise ViolationError("limit.tokens", f"{plan.num_tokens} tokens of at most {most_tokens}")
        if len(epoch.in_flight) > config.max_plans_in_flight:
            raise ViolationError("limit.in_flight", f"{len(epoch.in_flight)} plans in flight")
        if len(model.rows) == most_rows:
            coverage.limit(Limit.ROWS)
        if plan.num_tokens == most_tokens:
            coverage.limit(Limit.TOKENS)
        if len(epoch.in_flight) == config.max_plans_in_flight:
            coverage.limit(Limit.IN_FLIGHT)
        if len(plan.holds):
            coverage.limit(Limit.CREDIT)
        if len(plan.copy_sources) and config.prefix_cache != "radix":
            raise ViolationError("prefix.copy", f"blocks are copied under {config.prefix_cache}")
        if plan.swap_outs:
            coverage.limit(Limit.SWAPPED_OUT)
        if plan.swap_ins:
            coverage.limit(Limit.SWAPPED_IN)
        longest = config.long_prefill_token_threshold
        if longest and len(plan.chunk_lengths):
            if plan.chunk_lengths.max() > longest:
                raise ViolationError("limit.chunk", f"chunk of {plan.chunk_lengths.max()}")
            if plan.chunk_lengths.max() == longest:
                coverage.limit(Limit.CHUNK)
        self._attention_counted(plan, model, most_tokens)
        for row, generation, name in epoch.must_leave:
            present = model.rows.get(row)
            if present is not None and present.generation == generation and present.name == name:
                raise ViolationError("plan.after_end", f"row {row} is planned although its request left", present.name)
        epoch.must_leave.clear()
        for admission in plan.admissions:
            self._admitted(plan, admission, epoch)

    def _attention_counted(self, plan: Plan, model: ModelWorker, most_tokens: int) -> None:
        """Chunks are paid for with their contexts, but for a single token where less than its price is left."""
        break_even = model.break_even_context
        if not break_even:
            return
        left = (most_tokens - plan.num_decodes) * break_even
        for index, length in zip(plan.chunk_rows.tolist(), plan.chunk_lengths.tolist(), strict=True):
            if left <= 0:
                raise ViolationError("limit.attention", f"a chunk for row {index} in a step that is full")
            left -= length * (break_even + model.rows[index].computed - length)
            if left < 0:
                self._world.coverage.limit(Limit.ATTENTION)
                if length > 1:
                    raise ViolationError("limit.attention", f"chunk of {length} for row {index}")

    def _admitted(self, plan: Plan, admission: RowAdmission, epoch: Epoch) -> None:
        index, generation, num_cached = admission.row, admission.generation, admission.num_computed_tokens
        row = epoch.model.rows[index]
        stream = self._clients.live.get(row.name)
        if stream is None:
            raise ViolationError("plan.admission", "the request is not live", row.name)
        if epoch.draining:
            raise ViolationError("worker.draining", f"an admission to {epoch.worker_id}", row.name)
        if stream.demand.grammar and grammar_key(stream.demand.grammar) not in epoch.compiled:
            raise ViolationError("grammar.compiled", f"{epoch.worker_id} has not compiled its grammar", row.name)
        if admission.grammar != stream.demand.grammar:
            raise ViolationError("plan.admission", f"grammar {admission.grammar!r}", row.name)
        if num_cached and stream.demand.scored and not plan.swap_ins:
            raise ViolationError("prefix.whole", f"{num_cached} cached tokens", row.name)
        known = [*stream.demand.prompt, *stream.tokens]
        if row.tokens[: len(known)] != known or len(row.tokens) > len(known) + 1:
            raise ViolationError("plan.admission", f"{len(row.tokens)} tokens, {len(known)} are known", row.name)
        if num_cached:
            self._world.coverage.limit(Limit.SHARED)
            if self._config.prefix_cache == "off" and not plan.swap_ins:
                raise ViolationError("prefix.off", f"{num_cached} cached tokens", row.name)
            num_full, rest = divmod(num_cached, epoch.model.block_size)
            self._check_salt(stream, row.blocks[:num_full], epoch)
            if rest and row.blocks[num_full] in plan.copy_targets:
                self._world.coverage.limit(Limit.COPIED)
                sources = plan.copy_sources[plan.copy_targets == row.blocks[num_full]]
                self._check_salt(stream, sources.tolist(), epoch)
        if self._omniscient:
            if stream not in self.waiting:
                raise ViolationError("plan.admission", "it was not waiting, or had no credit", row.name)
            self.waiting.admit(stream)
        stream.placed, stream.row = epoch.peer, (index, generation)
        stream.placements += 1
        stream.context = min(stream.context, epoch.context)
        if stream.num_known + 1 >= epoch.context:
            self._world.coverage.limit(Limit.CONTEXT)
        self._check_tenant(stream)

    def _check_salt(self, stream: Stream, blocks: list[int], epoch: Epoch) -> None:
        """Nobody is given what was computed under another salt."""
        for block in blocks:
            name = epoch.model.writer(block)
            writer = self._clients.find(name) if name is not None else None
            if writer is not None and writer.demand.salt != stream.demand.salt:
                raise ViolationError("prefix.salt", f"block {block} is {writer.name}'s", stream.name)

    def _check_tenant(self, stream: Stream) -> None:
        limits = self._config.tenant_limits
        tenant = limits.get(stream.demand.tenant, limits.get(""))
        if tenant is None or not tenant.max_running or not self._omniscient:
            return
        same = (other for other in self._clients.live.values() if other.demand.tenant == stream.demand.tenant)
        running = sum(other.placed is not None for other in same)
        if running > tenant.max_running:
            raise ViolationError("limit.tenant", f"{running} of tenant {stream.demand.tenant!r} run", stream.name)

    # ---------------------------------------------------------------- never idle with work

    def no_plan(self, epoch: Epoch, stats: Callable[[], SchedulerStats]) -> None:
        """The core has nothing to do for a worker that is idle; so nobody may be waiting whom it could serve."""
        if not self._omniscient:
            return
        self._world.coverage.limit(Limit.IDLE)
        for stream in self._clients.live.values():
            if stream.placed == epoch.peer and not stream.starved:
                raise ViolationError("work.running", f"{epoch.peer!r} is idle and could go on with it", stream.name)
        config = self._config
        alone = len(self._cluster.epochs) == 1 and not epoch.draining and not config.tenant_limits
        if not alone or config.batching.mode != "continuous" or config.batching.delay_factor or not len(self.waiting):
            return
        (worker,) = stats().workers
        if worker.rows_running >= min(config.max_num_seqs, epoch.model.max_rows):
            return
        reserve = 0
        if worker.rows_running:
            if config.capacity != "max_utilization" or epoch.preempted:
                return
            reserve = int(config.watermark * worker.blocks_total)
        self._world.coverage.limit(Limit.IDLE_WITH_WAITING)
        available = worker.blocks_free + worker.blocks_cached
        for stream in self.waiting.streams():
            needed = -(-stream.num_known // epoch.model.block_size)
            prefilling = any(not row.decoding for row in epoch.model.rows.values())
            if stream.demand.grammar and grammar_key(stream.demand.grammar) not in epoch.compiled:
                return
            if needed + reserve > available or self._unsettled(stream) or prefilling or stream.starved:
                return
        raise ViolationError(
            "work.waiting", f"{epoch.peer!r} is idle and could admit it", self.waiting.streams()[0].name
        )

    def _unsettled(self, stream: Stream) -> bool:
        if stream.unsettled_until is None:
            return False
        number, step = stream.unsettled_until
        return any(e.number == number and e.model.answered_step < step for e in self._cluster.epochs.values())
