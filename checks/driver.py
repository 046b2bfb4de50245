"""Minimal scheduler that drives an engine with explicit plans and tracks its blocks.

Blocks are assigned in random order, so that a row's blocks are not contiguous. The next plan contains exactly the
chunks, holds and leaves that the test requested.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opentelemetry.trace import NoOpTracer, Tracer

from protos.quire.plan.v1 import plan_pb2
from shared.columns import from_column, to_column
from shared.config import WorkerConfig
from worker_svc.device.accelerator import Accelerator
from worker_svc.execution.assembly import build_engine
from worker_svc.execution.engine import Engine
from worker_svc.link.decoding import decode_plan
from worker_svc.link.encoding import encode_result
from worker_svc.model.loader import load_model
from worker_svc.ranks.group import Group

CPU = torch.device("cpu")
GREEDY = plan_pb2.SamplingParams()


_SETTINGS: dict[str, Any] = {"kv_cache_memory": "32MiB", "max_num_batched_tokens": 512}
"""Settings for which a prompt of several hundred tokens fits into one step."""


def make_engine(
    folder: Path,
    *,
    tracer: Tracer | None = None,
    accelerator: Accelerator | None = None,
    group: Group | None = None,
    **settings: Any,
) -> Engine:
    """Return an engine on the CPU for a checkpoint. With an accelerator, it works like on a GPU."""
    config = WorkerConfig(model=str(folder), device="cpu", num_threads=1, **(_SETTINGS | settings))
    model, description = load_model(config, CPU, group)
    return build_engine(config, model, description, CPU, tracer or NoOpTracer(), accelerator, group)


def launch(engine: Engine, message: plan_pb2.Plan) -> None:
    """Decode a plan as the link does, and launch its step.

    Raises:
        PlanError: the plan violates the protocol.
    """
    engine.launch(decode_plan(message, engine.limits), time.time_ns())


def collect(engine: Engine) -> plan_pb2.StepResult:
    """Return the oldest result as the link encodes it."""
    return encode_result(engine.collect())


def execute(engine: Engine, message: plan_pb2.Plan) -> plan_pb2.StepResult:
    """Execute one plan and return its result.

    Raises:
        PlanError: the plan violates the protocol.
    """
    launch(engine, message)
    return collect(engine)


@dataclass(slots=True)
class Row:
    """State of a row in the driver."""

    tokens: list[int]
    """All known tokens: prompt and output."""
    num_known: int
    """Number of tokens at admission, which are computed in prefill."""
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)
    """Blocks of the KV groups with a window. A row takes up to `window_period` per group, then reuses them in order."""
    window_period: int = 0
    held: bool = False
    draft_limit: int = 0
    ahead: int = 0
    """Maximum number of drafts that steps in flight may accept."""

    @property
    def in_prefill(self) -> bool:
        """Whether some of the admitted tokens are not computed yet."""
        return self.computed < self.num_known


class Driver:
    """Makes plans for one engine."""

    def __init__(self, engine: Engine, *, seed: int = 0) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.rows: dict[int, Row] = {}
        self.plan = plan_pb2.Plan(step=1)
        """The next plan so far."""
        self.last_result = plan_pb2.StepResult()
        self.num_drafted = self.num_accepted = 0
        """Drafts that all rows verified and accepted."""
        self._limits: deque[dict[int, int]] = deque()
        """Draft limits of the rows that decode in each step in flight."""
        self._generations: dict[int, int] = {}
        self._free = [int(block) for block in self.rng.permutation(engine.limits.num_blocks)]

    def free_rows(self) -> list[int]:
        """Rows that are not occupied."""
        return [row for row in range(self.engine.limits.max_rows) if row not in self.rows]

    def admit(
        self,
        tokens: list[int],
        *,
        row: int | None = None,
        sampling: plan_pb2.SamplingParams = GREEDY,
        traceparent: str = "",
        blocks: Sequence[int] = (),
        computed: int = 0,
        checkpoint: int | None = None,
    ) -> int:
        """Admit a row. Its blocks already contain the KV of the first `computed` tokens; chunks compute the rest.

        Its recurrent state after these tokens is in `checkpoint`.
        """
        row = self.free_rows()[0] if row is None else row
        self._generations[row] = self._generations.get(row, 0) + 1
        limits, period = self.engine.limits, 0
        windows: list[list[int]] = []
        if limits.num_kv_groups > 1:
            period = -(-(limits.window + limits.window_chunk - 2) // limits.block_size) + 1
            windows = [[self.take_block() for _ in blocks] for _ in range(1, limits.num_kv_groups)]
        self.rows[row] = Row(list(tokens), len(tokens), computed, list(blocks), windows, period)
        self.plan.admissions.append(
            plan_pb2.Admission(
                row=row,
                generation=self._generations[row],
                token_ids=to_column(tokens),
                num_prompt_tokens=len(tokens),
                num_computed_tokens=computed,
                block_tables=map(to_column, [blocks, *windows]),
                window_period=period,
                sampling=sampling.SerializeToString(),
                request_id=f"request-{row}",
                traceparent=traceparent,
                checkpoint=checkpoint,
            )
        )
        return row

    def save(self, row: int, length: int, checkpoint: int) -> None:
        """Save the recurrent state of a row after `length` tokens."""
        self.plan.save_rows += to_column([row])
        self.plan.save_lengths += to_column([length])
        self.plan.save_checkpoints += to_column([checkpoint])

    def keep(self, checkpoint: int, place: int) -> None:
        """Copy the recurrent state of a checkpoint to a place in host memory."""
        self.plan.kept_checkpoints += to_column([checkpoint])
        self.plan.kept_places += to_column([place])

    def take_block(self) -> int:
        """Take an unused block."""
        return self._free.pop()

    def leave(self, row: int) -> list[int]:
        """Remove a row and return its tokens."""
        gone = self.rows.pop(row)
        for blocks in (gone.blocks, *gone.windows):
            self._free.extend(blocks)
        self.plan.leaves += to_column([row])
        return gone.tokens

    def hold(self, row: int) -> None:
        """Hold a decode row out."""
        self.rows[row].held = True
        self.plan.holds += to_column([row])

    def release(self, row: int) -> None:
        """Let a held row continue."""
        self.rows[row].held = False
        self.plan.releases += to_column([row])

    def speculate(self, row: int, draft_limit: int) -> None:
        """Set the draft limit of a row, from the next plan on."""
        self.rows[row].draft_limit = draft_limit
        self.plan.draft_rows += to_column([row])
        self.plan.draft_limits += to_column([draft_limit])

    def chunk(self, row: int, length: int) -> None:
        """Compute the next `length` admitted tokens of a row."""
        self.plan.chunk_rows += to_column([row])
        self.plan.chunk_lengths += to_column([length])

    def finish_plan(self) -> plan_pb2.Plan:
        """Append the blocks that the plan needs, count its tokens as computed, and begin the next plan."""
        plan = self.plan
        chunks = dict(zip(from_column(plan.chunk_rows).tolist(), from_column(plan.chunk_lengths).tolist(), strict=True))
        limits = {}
        for number, row in self.rows.items():
            decodes = not row.in_prefill and not row.held
            if decodes and row.draft_limit:
                limits[number] = row.draft_limit
                row.ahead += row.draft_limit
            count = chunks.get(number, 1 if decodes else 0)
            row.computed += count
            reach = min(row.computed + row.ahead, max(row.computed, self.engine.limits.max_model_len))
            while count and len(row.blocks) * self.engine.limits.block_size < reach:
                row.blocks.append(self.take_block())
                plan.append_rows += to_column([number])
                plan.append_blocks += to_column([row.blocks[-1]])
                for blocks in row.windows:
                    taken = [self.take_block()] if len(row.blocks) <= row.window_period else []
                    blocks += taken
                    plan.append_windows += to_column(taken or [-1])
        self._limits.append(limits)
        self.plan = plan_pb2.Plan(step=plan.step + 1)
        return plan

    def take(self, result: plan_pb2.StepResult) -> dict[int, int]:
        """Record a result; return the last token of each row that sampled."""
        self.last_result = result
        rows, tokens = from_column(result.rows).tolist(), from_column(result.tokens).tolist()
        counts = from_column(result.counts).tolist() or [1] * len(rows)
        drafted = from_column(result.draft_counts).tolist() or [0] * len(rows)
        limits = self._limits.popleft()
        sampled = {}
        for row, count, num_drafts in zip(rows, counts, drafted, strict=True):
            assert 1 <= count <= num_drafts + 1
            assert num_drafts <= limits.get(row, 0)
            self.num_drafted += num_drafts
            self.num_accepted += count - 1
            self.rows[row].computed += count - 1
            self.rows[row].tokens += tokens[:count]
            sampled[row] = tokens[count - 1]
            del tokens[:count]
        assert not tokens
        for row, limit in limits.items():
            if row in self.rows:
                self.rows[row].ahead -= limit
        return sampled

    def step(self) -> dict[int, int]:
        """Send the plan as it is, and return the last token of each row that sampled."""
        return self.take(execute(self.engine, self.finish_plan()))

    def generate(self, tokens: list[int], count: int, *, sampling: plan_pb2.SamplingParams = GREEDY) -> list[int]:
        """Generate `count` tokens after `tokens`, together with the existing rows."""
        row = self.admit(tokens, sampling=sampling)
        self.chunk(row, len(tokens))
        while len(self.rows[row].tokens) < len(tokens) + count:
            self.step()
        return self.leave(row)[len(tokens) :][:count]
