"""Groups of ranks for tests: the test's own process is rank 0, and the followers are separate processes.

`python -m tests.worker_svc.ranks RANK SIZE` reads one job per line from stdin: an engine's settings as JSON. It follows
rank 0 with this engine until rank 0 sends a stop, then takes the next job.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from checks.driver import CPU, Driver, collect, launch, make_engine
from protos.quire.plan.v1 import plan_pb2
from tests.worker_svc.fake_accelerator import FakeAccelerator
from worker_svc.follower import follow
from worker_svc.model import weight_only
from worker_svc.ranks.commands import Followers
from worker_svc.ranks.group import RENDEZVOUS, Group, Place, join, meet
from worker_svc.ranks.shard import Shard


class LeadingDriver(Driver):
    """A driver of rank 0, which passes its plans to the followers."""

    def __init__(self, engine: Any, followers: Followers, *, seed: int = 0) -> None:
        super().__init__(engine, seed=seed)
        self.followers = followers

    def step(self) -> dict[int, int]:
        """Send the plan to all ranks."""
        self.launch()
        return self.collect()

    def launch(self) -> None:
        """Launch the step of the plan on all ranks."""
        plan = self.finish_plan()
        self.followers.launch(plan_pb2.SchedulerMessage(epoch=1, plan=plan).SerializeToString())
        launch(self.engine, plan)

    def collect(self) -> dict[int, int]:
        """Book the result of the oldest step."""
        result = collect(self.engine)
        self.followers.collected()
        return self.take(result)


@dataclass(slots=True)
class Ranks:
    """Rank 0 of a group, and its followers."""

    group: Group
    processes: "list[subprocess.Popen[str]]"

    @contextlib.contextmanager
    def driver(
        self, folder: Path, *, seed: int = 0, accelerated: bool = False, in_e4m3: bool = False, **settings: Any
    ) -> Iterator[LeadingDriver]:
        """A driver for an engine on all ranks; with `accelerated` they work as on GPUs.

        With `in_e4m3`, they have products in e4m3.
        """
        job = {"folder": str(folder), "accelerated": accelerated, "in_e4m3": in_e4m3, **settings}
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        followers = Followers(self.group)
        accelerator = FakeAccelerator() if accelerated else None
        with patch.object(weight_only, "multiplies_e4m3", lambda _: in_e4m3):
            engine = make_engine(folder, group=self.group, accelerator=accelerator, **settings)
        yield LeadingDriver(engine, followers, seed=seed)
        followers.stop()


@contextlib.contextmanager
def ranks(size: int, *, one_machine: bool = True) -> Iterator[Ranks]:
    """Start a group: as a worker does on its own machine, or as torchrun does on several."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        place = {RENDEZVOUS: f"{folder}/ranks"} if one_machine else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= place | {"GLOO_SOCKET_IFNAME": "lo"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.worker_svc.ranks", str(rank), str(size)],
                stdin=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, size)
        ]
        try:
            yield Ranks(meet(join(Place(Shard(0, size)), CPU), CPU), processes)
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait(60) == 0
        finally:
            for process in processes:
                process.kill()
                process.wait()
            if dist.is_initialized():
                dist.destroy_process_group()
            for name in place:
                del os.environ[name]


def main() -> int:
    """Be a follower."""
    torch.set_num_threads(1)
    group = meet(join(Place(Shard(int(sys.argv[1]), int(sys.argv[2]))), CPU), CPU)
    for line in sys.stdin:
        settings = json.loads(line)
        accelerator = FakeAccelerator() if settings.pop("accelerated") else None
        in_e4m3 = settings.pop("in_e4m3")
        with patch.object(weight_only, "multiplies_e4m3", lambda _, in_e4m3=in_e4m3: in_e4m3):
            engine = make_engine(Path(settings.pop("folder")), group=group, accelerator=accelerator, **settings)
        follow(group, engine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
