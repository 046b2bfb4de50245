"""A record of many steps of three small workers, for replays.

The workers have little memory, so that requests are preempted and swapped, and one of the workers dies now and then.
"""

import random
from collections import deque
from pathlib import Path

import numpy as np

from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.plan import Plan
from shared.request_spec import RequestSpec
from tests.scheduler_svc.recording import Recording

_FRONTEND = b"frontend/1"
_MODEL = ev.ModelFacts(
    name="m", architecture="x", fingerprint="f", max_model_len=512, vocab_size=100, dtype="bf16", eos_token_ids=(2,)
)
_ROWS = 4
_BLOCK_SIZE = 4


class _Worker:
    """A worker that responds at once with random tokens, and accepts some of its drafts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.epoch = 0
        self._left: dict[int, int] = {}
        self._held: set[int] = set()
        self._limits: dict[int, int] = {}
        self._room: dict[int, int] = {}
        """Free positions in the row's blocks after its newest token."""

    def answer(self, plan: Plan) -> ev.StepDone:
        for row in plan.leaves.tolist():
            self._left.pop(row, None)
            self._held.discard(row)
            self._limits.pop(row, None)
        for admission in plan.admissions:
            self._left[admission.row] = len(admission.token_ids) - admission.num_computed_tokens
            self._room[admission.row] = _BLOCK_SIZE * len(admission.blocks) - len(admission.token_ids)
        for row in plan.append_rows.tolist():
            self._room[row] += _BLOCK_SIZE
        decoding = {row for row, left in self._left.items() if not left}
        self._held = (self._held | set(plan.holds.tolist())) - set(plan.releases.tolist())
        for row, length in zip(plan.chunk_rows.tolist(), plan.chunk_lengths.tolist(), strict=True):
            self._left[row] -= length
            if not self._left[row]:
                decoding.add(row)
        self._limits.update(zip(plan.draft_rows.tolist(), plan.draft_limits.tolist(), strict=True))
        rows = np.array(sorted(decoding - self._held), np.int32)
        drafts, counts = [], []
        for row in rows.tolist():
            most = min(self._limits.get(row, 0), max(0, self._room[row]))
            drafts.append(self._rng.randint(0, most))
            counts.append(1 + self._rng.randint(0, drafts[-1]))
            self._room[row] -= counts[-1]
        tokens = np.array([self._rng.randrange(100) for _ in range(sum(counts))], np.int32)
        copies = [copy.copy_id for copy in (*plan.swap_outs, *plan.swap_ins)]
        return ev.StepDone(
            worker=plan.worker,
            epoch=plan.epoch,
            step=plan.step,
            rows=rows,
            tokens=tokens,
            counts=np.array(counts, np.int32) if any(drafts) else None,
            draft_counts=np.array(drafts, np.int32) if any(drafts) else None,
            completed_copies=copies,
        )


def record_steps(folder: Path, num_steps: int, seed: int = 1) -> int:
    """Record at least `num_steps` answered steps; return their number."""
    rng = random.Random(seed)
    recording = Recording(folder, cut_every=500_000)
    config = CoreConfig(max_num_seqs=_ROWS, max_num_batched_tokens=64, prefix_cache="radix", policy="priority")
    core = recording.make_core(config, 1 << 40)
    core.handle(ev.FrontendJoined(frontend=_FRONTEND), 1.0)
    now, stream, steps, incarnation = 1.0, 0, 0, 0
    workers: dict[bytes, _Worker] = {}
    answers: deque[ev.StepDone] = deque()
    live = 0

    def carry_out(effects: list[ef.Effect]) -> None:
        nonlocal live
        for effect in effects:
            if isinstance(effect, ef.RequestEnded):
                live -= 1
            elif isinstance(effect, ef.WorkerUnknown):
                raise AssertionError(f"{effect.worker!r} is not known any more")

    while steps < num_steps:
        now += 0.004
        while len(workers) < 3:
            incarnation += 1
            peer = b"w/%d" % incarnation
            workers[peer] = _Worker(rng)
            hello = ev.WorkerHello(
                worker=peer, worker_id=f"w{incarnation}", model=_MODEL, block_size=_BLOCK_SIZE, num_blocks=150,
                max_rows=_ROWS, max_tokens_per_step=64, num_host_blocks=40, max_draft_tokens=3 * (incarnation % 2),
            )  # fmt: skip
            carry_out(core.handle(hello, now))
        # For most of the time there is no queue. For a tenth of the time, requests wait and are preempted.
        while live < (12 if steps // 1000 % 10 == 0 else 4):
            live += 1
            stream += 1
            family = rng.randrange(6)
            prompt = [*(family + at % 7 for at in range(rng.randrange(2, 24))), rng.randrange(100)]
            arrived = ev.RequestArrived(
                frontend=_FRONTEND,
                stream=stream,
                spec=RequestSpec(
                    f"r{stream}",
                    len(prompt),
                    rng.randrange(1, 200),
                    stop_token_ids=b"\x02\0\0\0" if rng.random() < 0.2 else b"",
                    priority=rng.randrange(4),
                ),
                token_ids=np.array(prompt, np.int32),
                credit=1 << 20,
            )
            carry_out(core.handle(arrived, now))
        if rng.random() < 1e-4:
            lost = rng.choice(list(workers))
            del workers[lost]
            answers = deque(each for each in answers if each.worker != lost)
            carry_out(core.handle(ev.WorkerLost(worker=lost, reason="killed"), now))
        if answers:
            steps += 1
            carry_out(core.handle(answers.popleft(), now))
        else:
            carry_out(core.handle(ev.TimePassed(), now))
        for peer in core.due_workers(now):
            while True:
                plan, effects = core.plan(peer, now)
                carry_out(effects)
                if plan is None:
                    break
                answers.append(workers[peer].answer(plan))
    recording.finish()
    return steps
