"""Fleet: decides which workers may join and when a worker is lost, and numbers their epochs.

One model is served at a time, so every worker must have the same model fingerprint as the connected workers. While no
worker is connected, a worker must have the model of a live request. After `worker_wait_s` without a worker, the next
worker determines the model, regardless of waiting requests.

After a core restart, a worker with another model may connect first. It is refused while requests for the earlier model
wait, so that these requests are not lost. The requests of a lost worker return to the queue.

An epoch is the time from one worker's Hello to its loss. Epochs count up from the scheduler's random incarnation, so
messages from an earlier scheduler or connection are recognised as stale.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import GrammarFailure
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.host_states import HostStates
from scheduler_svc.core.memory.partial_blocks import PartialBlocks
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.memory.prefix_directory import PrefixDirectory
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.memory.swapping import SwapSpace
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.memory.window_blocks import WindowBlocks, WindowSizes
from scheduler_svc.core.requests.request import Request, RequestState
from scheduler_svc.core.workers.batching import BatchGate
from scheduler_svc.core.workers.capacity import Capacity
from scheduler_svc.core.workers.cost_model import CostModel
from scheduler_svc.core.workers.plan_timing import PlanTiming
from scheduler_svc.core.workers.rows import RowTable
from scheduler_svc.core.workers.speculation import Speculation
from scheduler_svc.core.workers.worker import Worker
from shared.frames import MAX_SERVED_SEQUENCE

OWN_STALL_S = 0.5
"""Jump of time between two events, in seconds, above which the scheduler itself counts as stalled."""


_MAX_DRAINED = 1024
"""Maximum number of lost workers whose drain is remembered."""


@dataclass(frozen=True, slots=True)
class Service:
    """Service state that front ends must know."""

    ready: bool
    model: ev.ModelFacts | None
    max_model_len: int
    block_size: int
    """Block size of the worker that joined last, tokens."""


class Fleet:
    """All workers with a valid epoch."""

    def __init__(self, config: CoreConfig, incarnation: int, facts: TokenFacts) -> None:
        self._config = config
        self._facts = facts
        self._next_epoch = incarnation
        self._workers: dict[ev.Peer, Worker] = {}
        self.open: dict[int, Worker] = {}
        """The workers that accept requests, by epoch, in joining order; read-only."""
        self.with_disk: dict[int, Worker] = {}
        """The workers with a disk for cached blocks, by epoch, in joining order; read-only."""
        self._drained: dict[str, None] = {}
        """Names of lost workers that were drained. When such a process reconnects, it is still drained."""
        self.directory = PrefixDirectory()
        self._model: ev.ModelFacts | None = None
        self._max_model_len = 0
        self._block_size = 0
        self._last_time: float | None = None
        self.empty_since: float | None = None
        """Time since which no worker accepts requests; None while a worker does, or before the first event."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, peer: ev.Peer) -> Worker | None:
        """Return the worker of a connection, or None."""
        return self._workers.get(peer)

    def named(self, worker_id: str) -> Worker | None:
        """Return the worker with a name, or None."""
        return next((worker for worker in self if worker.worker_id == worker_id), None)

    def resume(self, worker_id: str) -> Worker | None:
        """End the drain of a worker, or of a lost worker that may reconnect; return the worker, or None."""
        self._drained.pop(worker_id, None)
        worker = self.named(worker_id)
        if worker is not None:
            worker.draining = False
            self._changed()
        return worker

    def drain(self, worker: Worker) -> None:
        """Begin the drain of a worker."""
        worker.draining = True
        self._changed()

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the current or last served model; "" before the first worker."""
        return "" if self._model is None else self._model.fingerprint

    def service(self) -> Service:
        lengths = [worker.max_model_len for worker in self._workers.values()]
        self._max_model_len = min(lengths, default=self._max_model_len)
        return Service(bool(self.open), self._model, self._max_model_len, self._block_size)

    def refusal(self, hello: ev.WorkerHello, *, models_in_use: Collection[str], now: float) -> str | None:
        """Return the reason why a worker is refused, or None.

        Args:
            hello: the description of the worker.
            models_in_use: model fingerprints of live requests; "" means the most recent model.
            now: the time, s.
        """
        if min(hello.num_blocks, hello.block_size, hello.max_rows) < 1:
            return (
                f"worker: num_blocks {hello.num_blocks}, block_size {hello.block_size} and max_rows {hello.max_rows}"
                " must each be at least 1; give it more memory or larger limits"
            )
        longest = min(hello.model.max_model_len, _num_positions(hello, hello.num_blocks) * hello.block_size)
        if longest < 2:
            return (
                f"max_model_len: {longest} is too short for a prompt token and a generated token; give the worker room"
                " for at least 2"
            )
        rows = min(hello.max_rows, self._config.max_num_seqs)
        if hello.max_tokens_per_step < rows:
            return (
                f"max_num_batched_tokens: the worker's {hello.max_tokens_per_step} is less than its max_num_seqs"
                f" ({rows}); raise it or lower max_num_seqs"
            )
        served, found = self._model, hello.model
        if any(worker.worker_id != hello.worker_id for worker in self._workers.values()):
            assert served is not None
            if served.fingerprint != found.fingerprint:
                return (
                    f"model: the worker loaded {found.name} ({found.fingerprint[:12]}), but the scheduler serves"
                    f" {served.name} ({served.fingerprint[:12]}); start the worker with the same model"
                )
            return _contradiction(served, found)
        missing_s = 0.0 if self.empty_since is None else now - self.empty_since
        wanted = {fingerprint or self.fingerprint for fingerprint in models_in_use} - {""}
        if not wanted or missing_s > self._config.worker_wait_s:
            return None
        if found.fingerprint not in wanted:
            return (
                f"model: the worker loaded {found.name} ({found.fingerprint[:12]}), but requests of another model"
                f" ({min(wanted)[:12]}) wait for a worker; start it with that model, or again in"
                f" {self._config.worker_wait_s - missing_s:.0f} s"
            )
        return _contradiction(served, found) if served is not None and served.fingerprint == found.fingerprint else None

    def join(self, hello: ev.WorkerHello) -> Worker:
        """Open an epoch for a worker that `refusal` accepts."""
        config = self._config
        num_blocks = hello.num_blocks
        if config.max_tokens_in_paged_kv_cache:
            num_blocks = min(num_blocks, max(1, config.max_tokens_in_paged_kv_cache // hello.block_size))
        self._next_epoch = (self._next_epoch + 1) % (1 << 64) or 1
        self._model = hello.model
        self._block_size = hello.block_size
        sizes = _window_sizes(hello)
        windows = None if sizes is None else WindowBlocks(num_blocks, sizes)
        room = _num_positions(hello, num_blocks) * hello.block_size
        max_model_len = min(hello.model.max_model_len, room, MAX_SERVED_SEQUENCE)
        # A recurrent state is that of one token, so a row can reuse computed tokens only up to a checkpoint.
        is_recurrent = hello.model.state_bytes > 0
        num_slots = hello.num_checkpoints if is_recurrent and config.prefix_cache != "off" else 0
        checkpoints = StateCheckpoints(num_slots, num_blocks) if num_slots else None
        shares_prefixes = config.prefix_cache != "off" and (not is_recurrent or checkpoints is not None)
        copies_parts = shares_prefixes and config.prefix_cache == "radix" and not is_recurrent and windows is None
        partial = PartialBlocks(num_blocks, hello.block_size) if copies_parts else None
        cache = PrefixCache(num_blocks, partial, self.directory, self._next_epoch, self._facts, checkpoints, windows)
        swaps = not is_recurrent or hello.num_host_states > 0
        costs = CostModel()
        worker = self._workers[hello.worker] = Worker(
            peer=hello.worker,
            worker_id=hello.worker_id,
            epoch=self._next_epoch,
            model=hello.model,
            max_tokens_per_step=hello.max_tokens_per_step,
            max_model_len=max_model_len,
            rows=RowTable(hello.max_rows, hello.block_size, -(-max_model_len // hello.block_size)),
            pool=BlockPool(num_blocks, cache, config.retention_share),
            costs=costs,
            timing=PlanTiming(),
            speculation=Speculation(hello.max_draft_tokens, costs),
            capacity=Capacity(config.capacity, num_blocks),
            gate=BatchGate(config.batching),
            shares_prefixes=shares_prefixes,
            swap=SwapSpace(
                hello.num_host_blocks if swaps else 0,
                num_disk_blocks=hello.num_disk_blocks if windows is None else 0,
                caches=shares_prefixes and (not is_recurrent or hello.num_host_states > 0),
                directory=self.directory,
                epoch=self._next_epoch,
                states=HostStates(hello.num_checkpoints, hello.num_host_states) if is_recurrent else None,
                state_blocks=_state_blocks(hello),
            ),
            protocol_version=hello.protocol_version,
            device=hello.device,
            cache_kinds=hello.cache_kinds,
            block_bytes=hello.block_bytes,
            pid=hello.pid,
            facts=self._facts,
            checkpoints=checkpoints,
            windows=windows,
        )
        if worker.swap.disk is not None:
            self.with_disk[worker.epoch] = worker
        worker.publisher.adopt(hello.retained)
        was_drained = hello.worker_id in self._drained
        self._drained.pop(hello.worker_id, None)
        # A new process that reuses a drained worker's name replaces that worker and is not drained.
        worker.draining = was_drained and hello.reason is not ev.HelloReason.STARTED
        self._changed()
        if not worker.draining:
            self.empty_since = None
        return worker

    def grammar_failure(self, key: bytes, serves: Callable[[Worker], bool]) -> GrammarFailure | None:
        """Return the reason why no worker that takes requests can use a grammar, or None while one may.

        If a worker reports that the grammar itself is invalid, it counts as failed on all workers that have not
        compiled it.

        Args:
            key: key of the grammar.
            serves: returns whether a worker serves the grammar's request. Other workers, and draining ones, count only
                if they report that the grammar itself is the cause.
        """
        found: GrammarFailure | None = None
        is_tried_by_all = True
        for worker in self._workers.values():
            failure = worker.grammars.failure(key)
            counts = not worker.draining and serves(worker)
            if not counts and (failure is None or not failure.is_invalid):
                continue
            if failure is None:
                if worker.grammars.is_ready(key):
                    return None
                is_tried_by_all = False
            elif found is None or failure.is_invalid:
                found = failure
        return found if found is not None and (is_tried_by_all or found.is_invalid) else None

    def leave(self, worker: Worker, now: float) -> list[Request]:
        """End a worker's epoch; return its unfinished requests, with every delivered token."""
        del self._workers[worker.peer]
        self.with_disk.pop(worker.epoch, None)
        self._changed()
        if worker.draining:
            self._drained[worker.worker_id] = None
            if len(self._drained) > _MAX_DRAINED:
                del self._drained[next(iter(self._drained))]
        worker.pool.cache.leave_directory()
        worker.swap.leave_directory()
        if not self.open and self.empty_since is None:
            self.empty_since = now
        running = [worker.vacate(row) for row in worker.rows.occupied()]
        departed = [departure.request for departure in worker.departed.values()]
        for request in departed:
            request.unsettled = False
        return running + [request for request in departed if request.state is RequestState.ENDING]

    def _changed(self) -> None:
        """Find the workers that accept requests, after a change."""
        self.open = {worker.epoch: worker for worker in self._workers.values() if not worker.draining}

    def overdue(self, now: float) -> list[Worker]:
        """Return the workers whose oldest step has taken too long."""
        return [worker for worker in self if (deadline := worker.step_deadline()) is not None and now > deadline]

    def time_passes(self, now: float) -> None:
        """Record the time; if the scheduler itself was stalled, extend the deadlines of all steps in flight."""
        last, self._last_time = self._last_time, now
        if self.open:
            self.empty_since = None
        elif self.empty_since is None:
            self.empty_since = now
        if last is None or now - last <= OWN_STALL_S:
            return
        for worker in self:
            for step in worker.in_flight:
                step.allowance += now - last


def _window_sizes(hello: ev.WorkerHello) -> WindowSizes | None:
    """Return the sizes of a worker's windows; None without KV groups with a window."""
    if hello.num_kv_groups == 1:
        return None
    return WindowSizes(
        block_size=hello.block_size,
        window=hello.window,
        num_tables=hello.num_kv_groups - 1,
        max_step=max(hello.window_chunk, 1 + hello.max_draft_tokens),
    )


def _state_blocks(hello: ev.WorkerHello) -> int:
    """Return the number of blocks as which the copy of a recurrent state counts: those of the same size."""
    state_bytes = hello.model.state_bytes
    return -(-state_bytes // hello.block_bytes) if hello.block_bytes else min(1, state_bytes)


def _num_positions(hello: ev.WorkerHello, num_blocks: int) -> int:
    """Return the number of blocks of the longest sequence that fits into `num_blocks` blocks of all KV groups."""
    sizes = _window_sizes(hello)
    return num_blocks if sizes is None else sizes.max_positions(num_blocks)


def _contradiction(served: ev.ModelFacts, found: ev.ModelFacts) -> str | None:
    """Return the difference between a worker's model description and that of the served model, or None.

    The fingerprint determines the compared fields. The operator chooses the name, and the longest sequence depends on
    the worker's memory.
    """
    for what in ("architecture", "dtype", "vocab_size", "eos_token_ids"):
        if getattr(served, what) != getattr(found, what):
            return (
                f"{what}: the worker reports {getattr(found, what)}, but the same model is served with"
                f" {getattr(served, what)}; start it with the same files and release"
            )
    return None
