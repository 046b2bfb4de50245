"""Worker process: from a configuration to an exit code. `quire worker` calls `run`."""

import errno
import hashlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
from opentelemetry.trace import NoOpTracer

from kernels.native.serving import native
from shared.config import ConfigError, WorkerConfig
from shared.curve import WORKER, load_keys
from shared.logging import configure_logging, get_logger
from shared.memory import return_free_memory
from shared.process_watch import own_process
from shared.pulse import Pulse
from shared.telemetry import Telemetry
from worker_svc.device.accelerator import make_accelerator
from worker_svc.device.choice import choose_device, describe_device, set_threads
from worker_svc.device.compiling import announce_compiling
from worker_svc.device.sensors import start_monitor
from worker_svc.execution.assembly import build_engine
from worker_svc.execution.engine import Engine
from worker_svc.follower import follow
from worker_svc.interface.limits import Limits
from worker_svc.link.connection import Link
from worker_svc.link.identity import Identity, worker_id
from worker_svc.loop import RefusedError, WorkerLoop
from worker_svc.memory.disk_files import BlockFiles
from worker_svc.memory.disk_tier import DiskTier
from worker_svc.model.loader import ModelDescription, load_model
from worker_svc.ranks.commands import Followers
from worker_svc.ranks.gpu_locks import alone_on
from worker_svc.ranks.group import RankLostError, join, meet, place_of
from worker_svc.ranks.shard import Shard

_DISK_FAILURES = {errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT, errno.ENXIO}
"""Errors of a broken, read-only or full disk, in contrast to those of a wrong setting."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


_MOST_STOPPING_S = 4.0
"""Maximum time between a signal and a rank's exit; shorter than the grace period in `quire serve`."""


def run(config: WorkerConfig, end: Callable[[int], None]) -> int:
    """Run one worker until SIGTERM or SIGINT.

    Args:
        config: the settings.
        end: exits this process with a code. It is called in a thread if a rank still waits for other ranks after a
            signal.

    Returns:
        The exit code: 0 after a signal; 1, with one line on stderr, if the configuration is invalid, the scheduler
        refuses this worker, or another of its ranks was lost; above 128 if a follower receives a signal while it loads.
    """
    configure_logging("quire-worker")
    try:
        telemetry = Telemetry("quire-worker")
        try:
            _serve(config, telemetry, end)
        finally:
            telemetry.shutdown()
    except _StoppedWhileLoading as stopped:
        return stopped.exit_code
    except (ConfigError, RefusedError, RankLostError) as error:
        kind = "refused by the scheduler: " if isinstance(error, RefusedError) else ""
        print(f"quire worker: {kind}{error}", file=sys.stderr)
        return 1
    except (
        torch.OutOfMemoryError
    ):  # This error is raised while the model is loaded or profiled. Steps handle their own errors.
        print(
            "quire worker: device: out of memory while loading the model; use a smaller model or a larger device",
            file=sys.stderr,
        )
        return 1
    return 0


class _StoppedWhileLoading(BaseException):
    """A signal arrived before the model was loaded. Not an `Exception`, so that no library catches it."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _StopOnSignal:
    """Signal handler: exits immediately while the model loads; after that, stops the loop.

    For a follower, a signal while it loads is a failure, because the worker cannot start without it. Its exit code is
    then 128 plus the signal number, as in a shell. After loading, a follower ignores signals, because it stops together
    with rank 0.

    Python runs a signal handler only after the main thread has returned from native code, but a rank may wait for
    minutes in a collective. A thread therefore terminates a rank that has not exited some time after a signal.
    """

    def __init__(self, shard: Shard, end: Callable[[int], None]) -> None:
        self.loop: WorkerLoop | None = None
        self.follows = False
        self._rank = shard.rank
        if shard.size > 1:
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            # The signal number is written to the pipe as soon as the signal arrives, even if the main thread is busy.
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader, end), name="signals", daemon=True).start()
        for number in _SIGNALS:
            signal.signal(number, self)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.loop is not None:
            self.loop.stop()
        elif not self.follows:
            raise _StoppedWhileLoading(self._exit_code(number))

    def _exit_code(self, number: int) -> int:
        return 128 + number if self._rank else 0

    def _watch(self, reader: int, end: Callable[[int], None]) -> None:
        while True:
            (number,) = os.read(reader, 1)
            if number not in _SIGNALS or self.follows:
                continue
            time.sleep(_MOST_STOPPING_S)
            if not self.follows:
                get_logger().warning("stopped while it waited for other ranks", rank=self._rank)
                end(self._exit_code(number))


def _serve(config: WorkerConfig, telemetry: Telemetry, end: Callable[[int], None]) -> None:
    place = place_of(config.tensor_parallel_size, os.environ)
    stop = _StopOnSignal(place.shard, end)
    shard = place.shard
    name = worker_id(config.worker_id, platform.node(), os.getpid())
    keys = load_keys(config.keys, WORKER)
    set_threads(config.num_threads, place.local_size)
    device = choose_device(config.device, place.local_rank, place.local_size)
    group = join(place, device)
    with alone_on(device, group):
        model, description = load_model(config, device, group)
        group = meet(group, device)
        tracer = telemetry.tracer if group.rank == 0 else NoOpTracer()
        engine = build_engine(
            replace(config, worker_id=name), model, description, device, tracer, make_accelerator(device), group
        )
    return_free_memory()  # Loading needs much more than the model.
    if group.rank > 0:
        stop.follows = True
        get_logger().info("rank ready", rank=shard.rank, ranks=shard.size, device=str(device))
        follow(group, engine)
        return
    protect = (lambda _socket: None) if keys is None else keys.protect_client
    disk = _open_disk(config, engine, description)
    limits = engine.limits if disk is not None else replace(engine.limits, num_disk_blocks=0)
    link = Link(config.worker_address, _identity(name, limits, description, device, group.size), protect)
    pulse = Pulse()
    followers = Followers(group)
    monitor = start_monitor(device, place.local_size)
    stop.loop = loop = WorkerLoop(link, engine, pulse, followers, monitor, disk)
    get_logger().info(
        "worker ready",
        worker=name,
        model=description.name,
        architecture=description.architecture,
        dtype=description.dtype_name,
        device=str(device),
        cpu_kernels=_cpu_kernels(device),
        num_blocks=engine.limits.num_blocks,
        block_size=engine.limits.block_size,
        max_model_len=description.max_model_len,
        ranks=group.size,
    )

    def send_compiling(expected_ms: int) -> None:
        pulse.beat()
        link.send_compiling(expected_ms)

    try:
        # Without a GPU, nothing is compiled, so do not import triton to count compilations.
        with announce_compiling(send_compiling) if device.type == "cuda" else nullcontext():
            loop.run()
            followers.stop()
    finally:
        if monitor is not None:
            monitor.stop()
        if disk is not None:
            disk.stop()
        engine.reset()  # The reset ends the spans of the rows.


def _open_disk(config: WorkerConfig, engine: Engine, description: ModelDescription) -> DiskTier | None:
    """Open the disk cache, if there is one.

    A worker also restarts while its disk is broken, read-only or full. It then serves without the disk.

    Raises:
        ConfigError: the folder cannot be used, and its disk is not the reason.
    """
    if not engine.limits.num_disk_blocks:
        return None
    host = engine.host_bytes()
    layout = [
        description.fingerprint,
        description.dtype_name,
        str(description.kv_dtype),
        engine.limits.block_size,
        config.draft_model if config.speculation == "draft" else None,
        host.layout,
        [0, 1],  # The rank, and the number of ranks.
    ]
    try:
        files = BlockFiles(
            Path(config.disk_cache),
            num_slots=engine.limits.num_disk_blocks,
            block_bytes=host.block_bytes,
            identity=hashlib.sha256(json.dumps(layout).encode()).digest(),
        )
    except OSError as error:
        if error.errno in _DISK_FAILURES:
            get_logger().warning(
                "disk cannot be used; serving without it until the worker restarts",
                folder=config.disk_cache,
                reason=error.strerror,
            )
            return None
        raise ConfigError(
            f"disk_cache: {config.disk_cache} cannot be used ({error.strerror or error}); use another folder"
        ) from None
    get_logger().info("disk cache", folder=str(files.folder), blocks=files.num_slots, block_bytes=host.block_bytes)
    return DiskTier(files, host)


def _cpu_kernels(device: torch.device) -> str | None:
    """Return the instruction set of the native CPU kernels, "torch" without them, or None on a GPU."""
    if device.type != "cpu":
        return None
    kernels = native()
    return "torch" if kernels is None else kernels.level_name


def _identity(
    name: str, limits: Limits, description: ModelDescription, device: torch.device, num_ranks: int
) -> Identity:
    return Identity(
        worker_id=name,
        limits=limits,
        model=description.name,
        architecture=description.architecture,
        fingerprint=description.fingerprint,
        dtype=description.dtype_name,
        eos_token_ids=description.eos_token_ids,
        break_even_context=description.break_even_context,
        device=describe_device(device, num_ranks),
        pid=os.getpid(),
        process=own_process(),
    )
