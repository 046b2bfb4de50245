"""The workers: who may join, in which epoch each is, when one has to be given up.

One model is served at a time. The first worker decides which; others must have the same fingerprint, until no request
depends on it any more. An epoch is one worker's time from Hello to its loss; epochs count up from the
scheduler's random incarnation, so no message of an earlier scheduler or connection is ever taken for a present one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.core import events as ev
from scheduler_svc.core.batching import BatchGate
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.capacity import Capacity
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.partial_blocks import PartialBlocks
from scheduler_svc.core.prefix_cache import PrefixCache
from scheduler_svc.core.request import Request, RequestState
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.step_clock import StepClock
from scheduler_svc.core.swapping import SwapSpace
from scheduler_svc.core.worker import Worker

OWN_STALL_S = 0.5
"""When time jumps by more than this between two events, it was the scheduler that stood still."""


@dataclass(frozen=True, slots=True)
class Service:
    """What front ends must know."""

    ready: bool
    model: ev.ModelFacts | None
    max_model_len: int
    block_size: int
    """Of the worker that joined last."""


class Fleet:
    """All workers in a valid epoch."""

    def __init__(self, config: CoreConfig, incarnation: int) -> None:
        self._config = config
        self._next_epoch = incarnation
        self._workers: dict[ev.Peer, Worker] = {}
        self._model: ev.ModelFacts | None = None
        self._max_model_len = 0
        self._block_size = 0
        self._last_time: float | None = None
        self.empty_since: float | None = None
        """Since when no worker takes requests; None while one does, or before time has passed at all."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, peer: ev.Peer) -> Worker | None:
        """The worker of a connection."""
        return self._workers.get(peer)

    def named(self, worker_id: str) -> Worker | None:
        """The worker with a name."""
        return next((worker for worker in self if worker.worker_id == worker_id), None)

    def service(self) -> Service:
        """What is served now."""
        lengths = [worker.max_model_len for worker in self._workers.values()]
        self._max_model_len = min(lengths, default=self._max_model_len)
        return Service(self._is_usable(), self._model, self._max_model_len, self._block_size)

    def refusal(self, hello: ev.WorkerHello, *, model_in_use: bool) -> str | None:
        """Why a worker cannot serve here, or None.

        Args:
            hello: what it says of itself.
            model_in_use: whether live requests depend on the model served so far.
        """
        if min(hello.num_blocks, hello.block_size, hello.max_rows) < 1:
            return "num_blocks, block_size and max_rows must be at least 1"
        if min(hello.model.max_model_len, hello.num_blocks * hello.block_size) < 2:
            return "max_model_len must be at least 2: a token of a prompt and one that is generated"
        rows = min(hello.max_rows, self._config.max_num_seqs)
        if hello.max_tokens_per_step < rows:
            return (
                f"max_num_batched_tokens of the worker ({hello.max_tokens_per_step}) must be at least its"
                f" max_num_seqs ({rows})"
            )
        others = any(worker.worker_id != hello.worker_id for worker in self._workers.values())
        served = self._model if others or model_in_use else None
        if served is not None and served.fingerprint != hello.model.fingerprint:
            return (
                f"this scheduler serves {served.name} ({served.fingerprint[:12]}), the worker loaded"
                f" {hello.model.name} ({hello.model.fingerprint[:12]}): start it with the same model"
            )
        return _contradiction(served, hello.model) if served is not None else None

    def join(self, hello: ev.WorkerHello) -> Worker:
        """Opens an epoch for a worker that is not refused."""
        config = self._config
        num_blocks = hello.num_blocks
        if config.max_tokens_in_paged_kv_cache:
            num_blocks = min(num_blocks, max(1, config.max_tokens_in_paged_kv_cache // hello.block_size))
        self._next_epoch = (self._next_epoch + 1) % (1 << 64) or 1
        self._model = hello.model
        self._block_size = hello.block_size
        self.empty_since = None
        max_model_len = min(hello.model.max_model_len, num_blocks * hello.block_size)
        partial = PartialBlocks(num_blocks, hello.block_size) if config.prefix_cache == "radix" else None
        worker = self._workers[hello.worker] = Worker(
            peer=hello.worker,
            worker_id=hello.worker_id,
            epoch=self._next_epoch,
            model=hello.model,
            max_tokens_per_step=hello.max_tokens_per_step,
            max_model_len=max_model_len,
            rows=RowTable(hello.max_rows, hello.block_size, -(-max_model_len // hello.block_size)),
            pool=BlockPool(num_blocks, PrefixCache(num_blocks, partial)),
            clock=StepClock(config.step_deadline_s),
            capacity=Capacity(config.capacity, num_blocks, config.watermark),
            gate=BatchGate(config.batching),
            shares_prefixes=config.prefix_cache != "off",
            swap=SwapSpace(hello.num_host_blocks),
            protocol_version=hello.protocol_version,
            device=hello.device,
            pid=hello.pid,
        )
        return worker

    def leave(self, worker: Worker, now: float) -> list[Request]:
        """Ends a worker's epoch; returns the requests that it leaves behind, with every delivered token."""
        del self._workers[worker.peer]
        if not self._is_usable() and self.empty_since is None:
            self.empty_since = now
        running = [worker.vacate(row) for row in worker.rows.occupied()]
        departed = [departure.request for departure in worker.departed.values()]
        for request in departed:
            request.unsettled = False
        return running + [request for request in departed if request.state is RequestState.ENDING]

    def _is_usable(self) -> bool:
        for worker in self._workers.values():  # noqa: SIM110 - asked at every event: `any` takes five times as long
            if not worker.draining:
                return True
        return False

    def overdue(self, now: float) -> list[Worker]:
        """Workers whose oldest step has taken too long."""
        return [worker for worker in self if (deadline := worker.step_deadline()) is not None and now > deadline]

    def time_passes(self, now: float) -> None:
        """Takes note of time; when the scheduler itself stood still, no worker is blamed for it."""
        last, self._last_time = self._last_time, now
        if self._is_usable():
            self.empty_since = None
        elif self.empty_since is None:
            self.empty_since = now
        if last is None or now - last <= OWN_STALL_S:
            return
        for worker in self:
            for step in worker.in_flight:
                step.allowance += now - last


def _contradiction(served: ev.ModelFacts, found: ev.ModelFacts) -> str | None:
    """What a worker says otherwise of the model that it shares with the others, if anything.

    The fingerprint settles these; the name is the operator's, and the longest sequence what the worker has memory for.
    """
    for what in ("architecture", "dtype", "vocab_size", "eos_token_ids"):
        if getattr(served, what) != getattr(found, what):
            return (
                f"the worker gives {what} {getattr(found, what)} for a model that is served with"
                f" {getattr(served, what)}: start it with the same files and release"
            )
    return None
