"""Records of runs whose workers take exactly as long as a formula says; an event loop that is not the simulation's.

Workers may speculate. Part of each text repeats itself. There, a worker proposes as many drafts as permitted, and they
are accepted up to the end of that part. Elsewhere it has no drafts, or a wrong one.

Workers may have host memory and a disk, whose jobs run one after the other.
"""

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.disk import DiskAction
from scheduler_svc.core.interface.plan import Plan
from shared.columns import to_column
from shared.prefix_keys import following_keys, root_key
from shared.request_spec import RequestSpec
from tests.scheduler_svc.recording import Recording

_FRONTEND = b"frontend/1"
_MODEL = ev.ModelFacts(
    name="m", architecture="x", fingerprint="f", max_model_len=512, vocab_size=1000, dtype="bf16", eos_token_ids=(2,)
)
_BLOCK_SIZE = 4
_STEP_S, _DECODE_S, _PREFILL_S, _LINK_S = 0.004, 0.0003, 0.0001, 0.0005
_DRAFTING_S, _DRAFT_S = 0.0002, 0.0001
_COPY_S = 0.0001
"""Per block that is copied between device and host."""
_DISK_READ_S, _DISK_WRITE_S, _DISK_LATENCY_S = 0.0002, 0.0003, 0.0004
_REPEATED_SHARE = 0.6
_PART = 12
"""Number of tokens in a repeating or non-repeating part of a text."""
_STOP = 7
_TICK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a worker, in blocks of four tokens."""

    num_blocks: int = 400
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    block_bytes: int = 4096
    """Bytes per block, for the size of the disk."""


_MEMORY = Memory()


class _Worker:
    """A worker with an inbox: it computes one plan after the other."""

    def __init__(self, peer: bytes) -> None:
        self.peer = peer
        self.held: set[int] = set()
        self.disk_free_at = 0.0
        self.inbox: deque[tuple[float, Plan]] = deque()
        self.left: dict[int, int] = {}
        self.generated: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self.streams: dict[int, int] = {}
        self.num_prompt: dict[int, int] = {}
        self.num_blocks: dict[int, int] = {}
        self.draft_limits: dict[int, int] = {}
        self.free_at = 0.0

    def begins_at(self) -> float:
        return max(self.free_at, self.inbox[0][0] + _LINK_S / 2) if self.inbox else float("inf")

    def step(self, outputs: dict[int, int]) -> tuple[float, ev.StepDone]:
        """Compute the oldest plan; return the arrival time of its result, and the result."""
        begin = self.begins_at()
        _, plan = self.inbox.popleft()
        for row in plan.leaves.tolist():
            del self.left[row]
        for each in plan.admissions:
            self.held.discard(each.row)
            self.left[each.row] = len(each.token_ids) - each.num_computed_tokens
            self.generated[each.row] = len(each.token_ids) - each.spec.num_prompt_tokens
            self.outputs[each.row] = outputs[each.stream]
            self.streams[each.row], self.num_prompt[each.row] = each.stream, each.spec.num_prompt_tokens
            self.num_blocks[each.row], self.draft_limits[each.row] = len(each.blocks), 0
        for row in plan.append_rows.tolist():
            self.num_blocks[row] += 1
        for row, limit in zip(plan.draft_rows.tolist(), plan.draft_limits.tolist(), strict=True):
            self.draft_limits[row] = limit
        self.held |= set(plan.holds.tolist())
        self.held -= set(plan.releases.tolist())
        samples = [row for row, left in self.left.items() if not left and row not in self.held]
        drafts = {row: self._drafts(row) for row in samples}
        num_drafts = sum(verified for verified, _ in drafts.values())
        copies = (*plan.swap_outs, *plan.swap_ins)
        copied = sum(len(copy.sources) for copy in copies)
        seconds = _STEP_S + _DECODE_S * len(samples) + _PREFILL_S * int(plan.chunk_lengths.sum()) + _COPY_S * copied
        if num_drafts:
            seconds += _DRAFTING_S + _DRAFT_S * num_drafts
        for row, length in zip(plan.chunk_rows.tolist(), plan.chunk_lengths.tolist(), strict=True):
            self.left[row] -= length
            if not self.left[row]:
                samples.append(row)
        tokens, counts = [], []
        for row in sorted(samples):
            counts.append(1 + drafts.get(row, (0, 0))[1])
            for _ in range(counts[-1]):
                self.generated[row] += 1
                tokens.append(_STOP if self.generated[row] == self.outputs[row] else 100 + self.generated[row] % 50)
        self.free_at = begin + seconds
        answer = ev.StepDone(
            worker=self.peer,
            epoch=plan.epoch,
            step=plan.step,
            rows=np.array(sorted(samples), np.int32),
            tokens=np.array(tokens, np.int32),
            counts=np.array(counts, np.int32) if num_drafts else None,
            draft_counts=(
                np.array([drafts.get(row, (0, 0))[0] for row in sorted(samples)], np.int32) if num_drafts else None
            ),
            completed_copies=[copy.copy_id for copy in copies],
            copied_blocks=copied,
            copy_s=_COPY_S * copied,
            copy_delay_s=_COPY_S * copied,
        )
        return self.free_at + _LINK_S / 2, answer

    def disk_job(self, wanted: ef.DiskJobWanted, now: float) -> tuple[float, ev.DiskReported]:
        """Execute a disk job after the earlier ones; return the arrival time of its report, and the report."""
        job = wanted.job
        seconds = len(job.blocks) * (_DISK_READ_S if job.action is DiskAction.READ else _DISK_WRITE_S)
        self.disk_free_at = max(self.disk_free_at, now) + seconds
        report = ev.DiskReported(worker=self.peer, epoch=wanted.epoch, copy_id=job.copy_id, seconds=seconds)
        return self.disk_free_at + _DISK_LATENCY_S, report

    def _drafts(self, row: int) -> tuple[int, int]:
        """Return how many drafts a row verifies, and how many of them are accepted."""
        position, stream = self.generated[row], self.streams[row]
        room = self.num_blocks[row] * _BLOCK_SIZE - self.num_prompt[row] - position
        most = min(self.draft_limits[row], room)
        if not _repeats(stream, position):
            return min(most, int(position % 5 == 0)), 0
        accepted = 0
        while accepted < most and _repeats(stream, position + accepted):
            accepted += 1
        return most, accepted


def _repeats(stream: int, position: int) -> bool:
    """Return whether the text repeats itself at this position, so that drafts for it are right."""
    return random.Random(f"{stream} {position // _PART}").random() < _REPEATED_SHARE


def record_run(
    folder: Path,
    config: CoreConfig,
    *,
    num_workers: int,
    num_requests: int,
    seed: int = 3,
    max_drafts: int = 0,
    rate: float = 30.0,
    memory: Memory = _MEMORY,
    num_families: int = 3,
) -> None:
    """Record a run until every request has ended.

    Args:
        folder: folder of the record.
        config: configuration of the core.
        num_workers: number of workers.
        num_requests: number of requests.
        seed: seed of the requests.
        max_drafts: most drafts per row and step; 0: workers do not speculate.
        rate: requests per second; one worker can serve about 30.
        memory: memory of each worker.
        num_families: number of beginnings of 24 tokens that half of the requests share.
    """
    rng = random.Random(seed)
    recording = Recording(folder)
    core = recording.make_core(config, 1 << 40)
    arrivals, outputs = _arrivals(rng, num_requests, rate, num_families)
    workers = [_Worker(b"w/%d" % number) for number in range(num_workers)]
    answers: list[tuple[float, ev.StepDone | ev.DiskReported]] = []
    now, tick, num_ended = 1.0, 1.0, 0
    core.handle(ev.FrontendJoined(frontend=_FRONTEND), now)
    for number, worker in enumerate(workers):
        hello = ev.WorkerHello(
            worker=worker.peer, worker_id=f"w{number}", model=_MODEL, block_size=_BLOCK_SIZE, max_rows=8,
            max_tokens_per_step=64, max_draft_tokens=max_drafts, num_blocks=memory.num_blocks,
            num_host_blocks=memory.num_host_blocks, num_disk_blocks=memory.num_disk_blocks,
            block_bytes=memory.block_bytes,
        )  # fmt: skip
        for effect in core.handle(hello, now):
            if memory.num_disk_blocks and isinstance(effect, ef.WorkerWelcomed):
                core.handle(ev.DiskReported(worker=worker.peer, epoch=effect.epoch, is_complete=True), now)
    while num_ended < num_requests:
        for worker in workers:
            # A plan may arrive while an earlier one is being computed.
            while worker.inbox:
                answers.append(worker.step(outputs))
        answers.sort(key=lambda each: each[0])
        times = [answers[0][0] if answers else 1e9, arrivals[0][0] if arrivals else 1e9, tick + _TICK_S]
        due = core.next_plan_due(now)
        now = max(now, min([*times, 1e9 if due is None else due]))
        effects: list[ef.Effect] = []
        while answers and answers[0][0] <= now:
            effects += core.handle(answers.pop(0)[1], now)
        while arrivals and arrivals[0][0] <= now:
            effects += core.handle(arrivals.popleft()[1], now)
        if now >= tick + _TICK_S:
            tick = now
            effects += core.handle(ev.TimePassed(), now)
        for peer in core.due_workers(now):
            while True:
                plan, found = core.plan(peer, now)
                effects += found
                if plan is None:
                    break
                next(each for each in workers if each.peer == peer).inbox.append((now, plan))
        for effect in effects:
            if isinstance(effect, ef.DiskJobWanted):
                answers.append(next(each for each in workers if each.peer == effect.worker).disk_job(effect, now))
        num_ended += sum(isinstance(effect, ef.RequestEnded) for effect in effects)
    recording.finish()


def _arrivals(
    rng: random.Random, number: int, rate: float, num_families: int
) -> tuple[deque[tuple[float, ev.RequestArrived]], dict[int, int]]:
    """Return the requests with their times, and how many tokens each generates."""
    families = [[rng.randrange(10, 1000) for _ in range(24)] for _ in range(num_families)]
    time = 2.0
    found: deque[tuple[float, ev.RequestArrived]] = deque()
    outputs: dict[int, int] = {}
    for stream in range(number):
        time += rng.expovariate(rate)
        prompt = (rng.choice(families) if rng.random() < 0.5 else []) + [
            rng.randrange(10, 1000) for _ in range(rng.randrange(2, 60))
        ]
        outputs[stream] = rng.randrange(2, 60)
        column = np.array(prompt, np.int32)
        keys = following_keys(root_key(_MODEL.fingerprint, b""), to_column(column), _BLOCK_SIZE)
        spec = RequestSpec(f"r{stream}", len(prompt), 80, stop_token_ids=to_column(np.array([_STOP], np.int32)))
        arrived = ev.RequestArrived(
            frontend=_FRONTEND, stream=stream, spec=spec, token_ids=column, credit=1 << 20, block_keys=keys,
            block_size=_BLOCK_SIZE,
        )  # fmt: skip
        found.append((time, arrived))
    return found, outputs
