"""Items with three real processes: one service per model serves several lists of requests."""

import asyncio
import re
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from measure.gpu.results import Figures
from measure.load.grpc_target import GrpcTarget
from measure.offline import OfflineRequest, Report, run_requests
from quire_server.serve.layout import ServeConfig
from quire_server.serve.service import Service
from shared.config import FrontendConfig, SchedulerConfig, WorkerConfig

_PHASE = re.compile(r'^quire_worker_seconds(?:_total)?\{[^}]*phase="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)


class Served:
    """A running service for lists of requests, with a synchronous interface."""

    def __init__(self, runner: asyncio.Runner, target: GrpcTarget, http: str) -> None:
        self._runner = runner
        self._target = target
        self._http = http

    def send(self, requests: Sequence[OfflineRequest], max_concurrency: int) -> tuple[Report, Figures]:
        """Send the requests; return their report, and the fraction of time that the device was idle between steps."""
        before = self._phases()
        report = self._runner.run(run_requests(self._target, requests, max_concurrency))
        after = self._phases()
        spent = {phase: after[phase] - before.get(phase, 0.0) for phase in ("forward", "sample", "idle")}
        return report, {"idle_share": spent["idle"] / (sum(spent.values()) or 1.0)}

    def _phases(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=10) as answer:
            return {phase: float(value) for phase, value in _PHASE.findall(answer.read().decode())}


def with_service(
    folder: Path, device: str, use: Callable[[Served], None], *, rows: int, tokens_per_step: int, max_model_len: int,
    weights: str = "random", kv_cache_dtype: str = "auto", starting: AbstractContextManager[object] | None = None,
) -> None:  # fmt: skip
    """Start a service over `folder`, let `use` send requests to it, and stop it.

    The context manager `starting` is active while the service starts.
    """
    config = ServeConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=tokens_per_step, prefix_cache="off", trace_steps=0.0
        ),
        worker=WorkerConfig(
            model=str(folder),
            device=device,
            load_format=weights,
            max_num_seqs=rows,
            max_num_batched_tokens=tokens_per_step,
            max_model_len=max_model_len,
            kv_cache_dtype=kv_cache_dtype,
        ),
        frontend=FrontendConfig(model=str(folder), grpc_port=0, http_port=0),
    )
    with asyncio.Runner() as runner:
        service = runner.run(_make(config))
        try:
            with starting or nullcontext():
                addresses = runner.run(service.start())
            target = runner.run(_connect(addresses.grpc))
            try:
                use(Served(runner, target, addresses.http))
            finally:
                runner.run(target.close())
        finally:
            runner.run(service.stop())


async def _make(config: ServeConfig) -> Service:
    return Service(config, log_level="warning")  # The constructor needs a running event loop.


async def _connect(address: str) -> GrpcTarget:
    return GrpcTarget(address)
