"""Engine steps in this process, without scheduler and sockets: host time, device time, and idle share.

Each case is a steady state: rows decode, and each step also has one prompt of another request. A step is launched while
the previous one runs, as in a worker.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from opentelemetry.trace import NoOpTracer

from measure.gpu.results import Figures
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.config import WorkerConfig
from worker_svc.device.accelerator import make_accelerator
from worker_svc.execution.assembly import build_engine
from worker_svc.execution.engine import Engine
from worker_svc.interface.arrays import IntArray
from worker_svc.interface.plan import Plan
from worker_svc.interface.result import StepTimings
from worker_svc.link.decoding import decode_plan
from worker_svc.model.base import Model
from worker_svc.model.loader import ModelDescription, load_model

_WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A steady state to measure."""

    decodes: int
    context: int
    """Tokens of each row in decode at the start."""
    prompt: int
    """Prompt tokens in each step; 0 for decode only."""
    steps: int
    drafts: int = 0
    """Draft tokens of each row in each step."""

    @property
    def name(self) -> str:
        """Name in the results."""
        found = f"{self.decodes} rows at {self.context}" + (f" + {self.prompt} tokens" if self.prompt else "")
        return found + (f", {self.drafts} drafts each" if self.drafts else "")


class _SameTokens:
    """A proposer of the same token everywhere, so that the number of drafts does not depend on the model."""

    def propose(self, rows: IntArray, most: IntArray) -> list[list[int]]:
        """See `Proposer.propose`."""
        return [[1] * count for count in most.tolist()]

    def prefill(self, rows: IntArray, lengths: IntArray) -> None:
        """Do nothing."""

    def follow(self, plan: Plan) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""


@contextmanager
def loaded(
    folder: Path,
    device: torch.device,
    *,
    rows: int,
    tokens_per_step: int,
    max_model_len: int,
    utilization: float,
    quantization: str = "none",
) -> Iterator["Loaded"]:
    """Release the memory of the previous model, then load a model with random weights.

    The caller must not keep a reference to the model or to an engine: each of them holds GPU memory.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    config = WorkerConfig(
        model=str(folder),
        device=str(device),
        load_format="random",
        max_num_seqs=rows,
        max_num_batched_tokens=tokens_per_step,
        max_model_len=max_model_len,
        gpu_memory_utilization=utilization,
        quantization=quantization,
    )
    yield Loaded(config, *load_model(config, device), device)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and the settings of its engines."""

    config: WorkerConfig
    model: Model
    description: ModelDescription
    device: torch.device

    def engine(self, *, graphs: bool, graph_tokens: int = 0, drafts: int = 0) -> tuple[Engine, Figures]:
        """Build an engine; return it with its start time, and the unused part of its memory share.

        Args:
            graphs: whether steps are captured.
            graph_tokens: the largest captured step with chunks or drafts; 0 for the default.
            drafts: maximum number of drafts per row.
        """
        gc.collect()  # A previous engine may still hold its KV cache.
        began = time.perf_counter()
        settings = {name: getattr(self.config, name) for name in self.config.__slots__}
        settings |= {"cuda_graphs": graphs, "cuda_graph_tokens": graph_tokens}
        if drafts:
            settings |= {"speculation": "ngram", "speculative_tokens": drafts}
        engine = build_engine(
            WorkerConfig(**settings),
            self.model,
            self.description,
            self.device,
            NoOpTracer(),
            make_accelerator(self.device),
        )
        if drafts:
            engine.propose_with(_SameTokens())
        figures: Figures = {"start_s": time.perf_counter() - began, "blocks": engine.limits.num_blocks}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            figures["unused_mib"] = (free - total * (1 - self.config.gpu_memory_utilization)) / 2**20
        return engine, figures


class Steps:
    """The plans of a case, and the engine that executes them."""

    def __init__(self, engine: Engine, case: Case) -> None:
        self._engine = engine
        self._case = case
        self._step = 0
        self._next_block = 0
        self._blocks: dict[int, int] = {}
        self._computed: dict[int, int] = {}
        self._generations: dict[int, int] = {}
        engine.reset()

    def run(self) -> Figures:
        """Return the medians over the steps of the case."""
        case = self._case
        for row in range(case.decodes):  # One at a time, so that each prompt fits into a step.
            self._launch(row, case.context, leaves=None)
            self._engine.collect()
        hosts: list[float] = []
        timings: list[StepTimings] = []
        began = 0.0
        previous = None
        for step in range(_WARM_UP + case.steps):
            if step == _WARM_UP:
                began = time.perf_counter()
            admitted = case.decodes + step % 2 if case.prompt else None
            hosts.append(self._launch(admitted, case.prompt, leaves=previous))
            previous = admitted
            if self._engine.num_in_flight == self._engine.max_in_flight:
                timings.append(self._engine.collect().timings)
        while self._engine.num_in_flight:
            timings.append(self._engine.collect().timings)
        wall_s = time.perf_counter() - began
        timings = timings[_WARM_UP:]
        busy = sum(each.forward_ns + each.sample_ns for each in timings)
        idle = sum(each.idle_before_ns for each in timings)
        return {
            "step_ms": 1e3 * wall_s / case.steps,
            "host_ms": 1e3 * statistics.median(hosts[_WARM_UP:]),
            "forward_ms": statistics.median(each.forward_ns for each in timings) / 1e6,
            "sample_ms": statistics.median(each.sample_ns for each in timings) / 1e6,
            "idle_share": idle / (busy + idle),
        }

    def _launch(self, admitted: int | None, length: int, *, leaves: int | None) -> float:
        """Launch a step with an admitted row's whole prompt; return the host time in seconds."""
        self._step += 1
        plan = plan_pb2.Plan(step=self._step)
        if leaves is not None:
            plan.leaves += to_column([leaves])
            del self._computed[leaves]
        if admitted is not None:
            self._computed[admitted] = self._blocks[admitted] = 0
            self._generations[admitted] = self._generations.get(admitted, 0) + 1
            tokens = np.arange(admitted, admitted + length) % self._engine.limits.vocab_size
            plan.admissions.append(
                plan_pb2.Admission(
                    row=admitted,
                    generation=self._generations[admitted],
                    token_ids=to_column(tokens.tolist()),
                    num_prompt_tokens=length,
                    block_tables=[b""],
                    sampling=plan_pb2.SamplingParams().SerializeToString(),
                    request_id=f"request-{admitted}",
                )
            )
            plan.chunk_rows, plan.chunk_lengths = to_column([admitted]), to_column([length])
            if self._case.drafts:
                plan.draft_rows, plan.draft_limits = to_column([admitted]), to_column([self._case.drafts])
        for row in self._computed:
            # The blocks have room for all drafts.
            self._computed[row] += length if row == admitted else 1 + self._case.drafts
            while self._blocks[row] * self._engine.limits.block_size < self._computed[row]:
                plan.append_rows += to_column([row])
                plan.append_blocks += to_column([self._next_block])
                self._blocks[row] += 1
                self._next_block = (self._next_block + 1) % self._engine.limits.num_blocks
        decoded = decode_plan(plan, self._engine.limits)
        began = time.perf_counter()
        self._engine.launch(decoded, time.time_ns())
        return time.perf_counter() - began
