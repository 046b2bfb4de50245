"""Followers of a worker with tensor parallelism, when the worker itself starts them.

`quire worker --tensor-parallel-size N` without torchrun's variables is rank 0. It starts ranks 1 .. N - 1 on the same
machine as processes with the same settings. The ranks find each other through a file, so no port is opened to other
machines. If a follower dies, rank 0 exits at once, even while it waits in a collective. If rank 0 dies, the followers
exit (`lifeline`).
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from quire_server.serve import lifeline
from quire_server.serve.layout import child_environment
from shared import pulse
from shared.config import WorkerConfig, to_flags

_RENDEZVOUS = "QUIRE_RENDEZVOUS_FILE"
_GRACE_S = 2.0
"""Time in which rank 0 may report an error that a follower has reported, such as an invalid setting."""


def start_followers(config: WorkerConfig) -> Callable[[], None]:
    """Start the other ranks, unless there are none or another program starts them (RANK is set).

    Returns:
        A function that removes the ranks' file; call it before this process exits without Python's own shutdown.
    """
    size = config.tensor_parallel_size
    if size == 1 or "RANK" in os.environ:
        return lambda: None
    folder = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
    clean_up = partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(clean_up)
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(size)}
    os.environ[_RENDEZVOUS] = str(folder / "rendezvous")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment = child_environment(os.environ, os.getpid())
    environment.pop(pulse.ENVIRONMENT, None)
    command = [sys.executable, "-P", "-m", "quire_server.cli.main", "worker", *to_flags(config)]
    for rank in range(1, size):
        process = subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), lifeline.ENVIRONMENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C stops rank 0, which stops the others
        )
        threading.Thread(target=_watch, args=(rank, process, clean_up), name=f"rank-{rank}", daemon=True).start()
    return clean_up


def _watch(rank: int, process: "subprocess.Popen[bytes]", clean_up: Callable[[], None]) -> None:
    """Wait for a follower to exit; exit too, unless the follower shut down in order."""
    exit_code = process.wait()
    if exit_code == 0:
        return
    if exit_code > 0:
        time.sleep(_GRACE_S)
    how = f"exit code {exit_code}" if exit_code > 0 else f"killed by signal {-exit_code}"
    clean_up()
    print(f"quire worker: rank {rank} exited ({how}), so the worker exits", file=sys.stderr, flush=True)
    os._exit(1)
