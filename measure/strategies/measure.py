"""Runs one case on its own service. Steps come from the flight record, and latencies from the client."""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np

from measure.load.grpc_target import GrpcTarget
from measure.load.targets import Request
from measure.offline import send
from measure.spread import Spread
from measure.strategies.bounds import fewest_steps, fewest_steps_in_blocks, static_steps
from measure.strategies.cases import BLOCK_SIZE, LONG_PROMPT, LONGEST, PROMPT_TOKENS, Asked, Case, Workload
from measure.strategies.occupancy import (
    Step,
    bars,
    idle_share,
    kv_waste,
    padded,
    read_steps,
    reserved_waste,
    steps_of,
)
from quire import _calls
from quire.admin.v1 import admin_pb2, admin_pb2_grpc
from quire_server.serve.layout import ServeConfig
from quire_server.serve.service import Service
from records.reader import read
from shared.config import FrontendConfig, SchedulerConfig, WorkerConfig
from shared.model_path import DEMO_MODEL, resolve_model

_Config = TypeVar("_Config", SchedulerConfig, WorkerConfig)
_WARM_UP = Asked(16)
_WORKER = "worker-0"
"""Name of the service's only worker."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completed request. Times are in seconds since the start of the run."""

    arrive_s: float
    times_s: tuple[float, ...]
    """Arrival of each token."""


async def run_cases(
    cases: Sequence[Case], done: Callable[[Case], None], repeats: int = 1
) -> list[list[dict[str, Any]]]:
    """Run cases with equal settings on one service; return the results for each. A static run gives two results.

    Args:
        cases: the cases.
        done: called after each case.
        repeats: number of runs per case; the fastest counts.

    Raises:
        QuireError: a request failed.
        ServeError: the service cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="quire-strategies-") as folder:
        record = Path(folder) / "record"
        settings = cases[0].all_settings() | {"record_dir": str(record)}
        if cases[0].needs_long_context:
            settings |= {"model": str(_long_model(Path(folder) / "model")), "load_format": "random"}
        answers = []
        async with Service(_config(settings), log_level="warning") as service:
            addresses = await service.start()
            async with (
                GrpcTarget(addresses.grpc) as target,
                grpc.aio.insecure_channel(addresses.grpc, _calls.channel_options(addresses.grpc)) as channel,
            ):
                operator = admin_pb2_grpc.AdminServiceStub(channel)
                await _ask(target, _WARM_UP, 0, time.perf_counter())
                for case in cases:
                    answers.append([await _ask_all(target, operator, case.workload) for _ in range(repeats)])
                    done(case)
        steps = read_steps(entry for segment in read(record) for entry in segment)
    results = []
    first = 1  # after the warm-up
    for case, runs in zip(cases, answers, strict=True):
        found = []
        for run in runs:
            found.append(_results(case, steps_of(steps, first, len(run)), run))
            first += len(run)
        results.append(min(found, key=lambda rows: float(rows[-1]["wall_s"])))
    return results


def grouped(cases: Iterable[Case]) -> list[list[Case]]:
    """Return the cases grouped by settings. Each group shares a service."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(json.dumps([case.all_settings(), case.needs_long_context]), []).append(case)
    return list(groups.values())


def _results(case: Case, steps: Sequence[Step], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    if case.strategy == "static":
        return [_static_padded(case, steps, answers), _result(case, "static-held", steps, answers)]
    return [_result(case, case.strategy, steps, answers)]


def _config(settings: Mapping[str, str | int | float]) -> ServeConfig:
    def own(config: type[_Config]) -> _Config:
        names = {field.name for field in fields(config)}
        values: dict[str, Any] = {name: value for name, value in settings.items() if name in names}
        return config(**values)

    return ServeConfig(
        scheduler=own(SchedulerConfig),
        worker=own(WorkerConfig),
        frontend=FrontendConfig(grpc_port=0, http_port=0, model=str(settings.get("model", DEMO_MODEL))),
    )


def _long_model(folder: Path) -> Path:
    """Make a checkpoint without weights that has the bundled model's sizes and more positions."""
    demo = resolve_model(DEMO_MODEL, weights=False)
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((demo / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = 2 * LONG_PROMPT
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


async def _ask_all(
    target: GrpcTarget, operator: "admin_pb2_grpc.AdminServiceAsyncStub", workload: Workload
) -> list[Answer]:
    """Send the requests. Those due at the start are queued together before the worker may take them."""
    if workload.arrives_at_once:
        await operator.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=_WORKER))
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(target, asked, seed, start)) for seed, asked in enumerate(workload.requests, 1)]
        if workload.arrives_at_once:
            while await _num_waiting(operator) < len(tasks):  # noqa: ASYNC110 (the server has no event for it)
                await asyncio.sleep(0.01)
            start = time.perf_counter()
            await operator.ResumeWorker(admin_pb2.ResumeWorkerRequest(worker_id=_WORKER))
    return [
        Answer(asked.arrive_s, tuple(each - start for each in task.result()))
        for asked, task in zip(workload.requests, tasks, strict=True)
    ]


async def _num_waiting(operator: "admin_pb2_grpc.AdminServiceAsyncStub") -> int:
    return (await operator.GetSchedulerState(admin_pb2.GetSchedulerStateRequest())).waiting_requests


async def _ask(target: GrpcTarget, asked: Asked, seed: int, start: float) -> tuple[float, ...]:
    """Send one request; return its token times."""
    await asyncio.sleep(max(0.0, start + asked.arrive_s - time.perf_counter()))
    prompt = tuple(np.random.default_rng(seed).integers(3, 1000, asked.prompt_tokens).tolist())
    return (await send(target, Request(prompt, asked.output_tokens, scheduling=asked.scheduling), 0.0)).times_s


def _static_padded(case: Case, steps: Sequence[Step], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the static run as if finished rows were padding and responses came at the end of each batch."""
    form = padded(steps)
    result = _result(case, "static-padded", steps, answers)
    wall = result["wall_s"] + form.extra_s
    stretch = wall / form.ends_s[-1]
    ends = [form.ends_s[batch] * stretch for _, batch in sorted(form.batch_of.items())]
    e2e = [max(0.0, end - answer.arrive_s) for end, answer in zip(ends, answers, strict=True)]
    return result | {
        "wall_s": wall,
        "out_tok_per_s": result["out_tok_per_s"] * result["wall_s"] / wall,
        "e2e_s": Spread.of(e2e).named("p50", "p99"),
        "ttft_s": Spread.of(e2e).named("p50", "p99", "max"),
        "itl_s": {"p50": 0.0, "p99": 0.0, "max": 0.0},
        "computed_from": "static-held",
    }


def _result(case: Case, strategy: str, steps: Sequence[Step], answers: Sequence[Answer]) -> dict[str, Any]:
    workload, settings = case.workload, case.settings
    num_tokens = sum(len(answer.times_s) for answer in answers)
    wall = max(answer.times_s[-1] for answer in answers) - min(answer.arrive_s for answer in answers)
    first_tokens = [answer.times_s[0] - answer.arrive_s for answer in answers]
    gaps = [gap for answer in answers for gap in np.diff(answer.times_s).tolist()]
    bounds: dict[str, Any] = {"fewest_steps": None, "bound_at_equal_slots": None, "bound": None}
    if workload.arrives_at_once:
        static = static_steps(workload.lengths, workload.slots)
        fewest = fewest_steps(workload.lengths, case.slots)
        if case.memory == "equal KV memory":
            fewest = fewest_steps_in_blocks(
                workload.lengths,
                case.slots,
                prompt_tokens=PROMPT_TOKENS,
                num_blocks=workload.slots * LONGEST // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
            )
        bounds = {
            "fewest_steps": fewest,
            "bound_at_equal_slots": static / fewest_steps(workload.lengths, workload.slots),
            "bound": static / fewest,
        }
    return {
        "workload": workload.name,
        "strategy": strategy,
        "memory": case.memory,
        "policy": settings.get("policy", "fcfs"),
        "capacity": settings.get("capacity", "max_utilization"),
        "step_tokens": settings.get("max_num_batched_tokens", 0),
        "slots": case.slots,
        "requests": len(answers),
        "out_tokens": num_tokens,
        "steps": len(steps),
        **bounds,
        "wall_s": wall,
        "out_tok_per_s": num_tokens / wall,
        "e2e_s": Spread.of(answer.times_s[-1] - answer.arrive_s for answer in answers).named("p50", "p99"),
        "ttft_s": Spread.of(first_tokens).named("p50", "p99", "max"),
        "itl_s": Spread.of(gaps).named("p50", "p99", "max"),
        "idle_slot_share": idle_share(steps, case.slots),
        "most_rows": max(len(step.computing) for step in steps),
        "mean_step_ms": 1e3 * sum(step.busy_s for step in steps) / len(steps),
        "kv_waste": kv_waste(steps, BLOCK_SIZE),
        "reserved_kv_waste": reserved_waste(steps, int(settings.get("max_model_len", LONGEST))),
        "gantt": [[bar.slot, bar.request, bar.begin, bar.end] for bar in bars(steps)],
    }
