"""Campaign that takes the leader away from two schedulers on different machines, while clients continue with Resume.

    python -m checks.chaos.takeovers --json takeovers.json

Needs root, iproute2 and etcd. Each machine is a network namespace. Two machines have one scheduler each; the third has
etcd, two workers, a front end and the clients. The faults follow in turn: SIGKILL of the leader, SIGSTOP with a later
SIGCONT, a cut network that is mended later, SIGTERM, and a command to the standby. Killed schedulers start again. Each
fault waits until the standby has the whole journal. The indices of all tokens are checked when they arrive. At the end,
the tokens of each stream, or of a share of the streams, are compared with the reference.
"""

import asyncio
import contextlib
import enum
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from checks.chaos import command
from checks.chaos.campaign import PATIENCE_S, quantiles
from checks.chaos.fronts import KillRecord, longest_pauses, until_all_get_on
from checks.chaos.load import Load, Streamed, check
from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.etcd import etcd
from measure.testbed.service import DEFAULTS, QUIRE, Service, free_ports
from quire_server.cli.keys import create

AWAY_S = 6.0
"""Time for which a stopped scheduler is stopped and a cut network is cut, seconds."""
_NETWORK = "10.94.0"
_NAMES = "/run/netns"
"""Folder in which `ip netns` stores namespaces."""
_INSIDE = "QUIRE_TAKEOVERS_INSIDE"
"""Variable that is set inside the namespaces of this campaign."""


class Fault(enum.Enum):
    """Ways in which the leader goes."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP and SIGCONT"
    CUT = "network cut and mended"
    EXIT = "SIGTERM"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Campaign:
    """Size and duration of a campaign."""

    num_streams: int
    max_tokens: int
    minutes: float
    interval_s: float
    """Minimum time between two faults."""
    lease_s: float
    journal_sync: str = "standby"
    seed: int = 0
    compared_share: float = 1.0
    """Share of the streams whose tokens are compared with the reference."""
    kinds: tuple[Fault, ...] = tuple(Fault)


@dataclass(slots=True)
class Outcome:
    """Result of a campaign."""

    faults: list[tuple[Fault, KillRecord]]
    streams: list[Streamed]
    tally: Tally
    takeovers: int
    seconds: float

    def figures(self) -> dict[str, Any]:
        """Return the results as JSON. A stream's pause is its longest gap between two messages around a fault."""
        pauses = longest_pauses([record for _, record in self.faults])
        by_kind: dict[Fault, list[float]] = {fault: [] for fault in Fault}
        for (fault, _), found in zip(self.faults, pauses, strict=True):
            by_kind[fault] += found
        return {
            "faults": len(self.faults),
            "takeovers": self.takeovers,
            "streams": len(self.streams),
            "tokens": sum(len(streamed.tokens) for streamed in self.streams),
            "tokens_compared": self.tally.tokens,
            "near_ties": self.tally.near_ties,
            "failed": sum(streamed.error is not None for streamed in self.streams),
            "seconds": round(self.seconds, 1),
            "pause_s": {fault.value: quantiles(found) for fault, found in by_kind.items()},
        }


@dataclass(slots=True)
class Machine:
    """A machine with a scheduler: a network namespace that is connected to the bridge."""

    name: str
    address: str
    flags: tuple[str, ...]
    folder: Path
    process: "subprocess.Popen[bytes] | None" = None
    logs: list[Path] = field(default_factory=list)

    def connect(self) -> None:
        """Create the namespace and its link."""
        _ip(f"netns add {self.name}")
        _ip(f"link add {self.name} type veth peer name eth0 netns {self.name}")
        _ip(f"link set {self.name} master quire up")
        _ip(f"-n {self.name} addr add {self.address}/24 dev eth0")
        _ip(f"-n {self.name} link set eth0 up")
        _ip(f"-n {self.name} link set lo up")

    def start(self) -> None:
        """Start the scheduler."""
        self.logs.append(self.folder / f"{self.name}-{len(self.logs)}.log")
        with self.logs[-1].open("wb") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *QUIRE, "scheduler", *self.flags],
                stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **DEFAULTS},
            )  # fmt: skip

    def cut(self) -> None:
        """Cut the network. No packet arrives, and no error is reported."""
        _ip(f"link set {self.name} down")

    def mend(self) -> None:
        """Connect the network again."""
        _ip(f"link set {self.name} up")

    def last_number(self) -> int:
        """Return the last number under which this scheduler led; 0 if it never led."""
        numbers = [0]
        for path in self.logs:
            for line in path.read_text().splitlines():
                if line.startswith("{") and '"scheduler is up"' in line:
                    numbers.append(json.loads(line)["leader_number"])
        return max(numbers)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


@contextlib.contextmanager
def _child(*arguments: str) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env={**os.environ, **DEFAULTS}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(campaign: Campaign, folder: Path) -> Outcome:
    """Run a campaign; raise AssertionError if a stream is wrong."""
    checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model")
    oracle = Oracle(checkpoint)
    create(folder / "keys")
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        machines = _machines(campaign, folder, stack)
        addresses = [machine.address for machine in machines]
        rows = f"--max-num-seqs={max(64, campaign.num_streams)}"
        for index in range(2):
            stack.enter_context(
                _child(
                    *(
                        *QUIRE,
                        "worker",
                        f"--model={checkpoint}",
                        "--dtype=float32",
                        rows,
                        "--max-num-batched-tokens=2048",
                    ),
                    *(f"--worker-id=worker-{index}", f"--keys={folder}/keys/worker"),
                    "--worker-address=" + ",".join(f"tcp://{each}:5702" for each in addresses),
                )
            )
        grpc, http = free_ports(2)
        stack.enter_context(
            _child(
                *(*QUIRE, "frontend", f"--model={checkpoint}", f"--grpc-port={grpc}", f"--http-port={http}"),
                f"--keys={folder}/keys/frontend",
                "--frontend-address=" + ",".join(f"tcp://{each}:5701" for each in addresses),
            )
        )
        service = Service(f"127.0.0.1:{grpc}", f"127.0.0.1:{http}")
        _until(lambda: service.metric("quire_workers") == 2, "two workers are connected")
        load = Load(
            service.grpc, campaign.num_streams, oracle.vocab_size, campaign.max_tokens, campaign.seed, resumable=True
        )
        faults = asyncio.run(_strike_under_load(campaign, machines, service, load))
        service.wait_until_empty()
        takeovers = len({line for machine in machines for path in machine.logs for line in path.read_text().splitlines()
                         if '"scheduler is up"' in line}) - 1  # fmt: skip
    tally = Tally()
    rng = random.Random(campaign.seed)
    for streamed in load.done:
        assert streamed.error is None, f"{streamed.request_id}: {streamed.error!r}"
        assert streamed.schema is not None or len(streamed.tokens) == streamed.max_tokens, streamed.request_id
        if rng.random() < campaign.compared_share:
            check(oracle, streamed, tally)
    assert tally.near_ties * 1000 < tally.tokens, tally
    return Outcome(faults, load.done, tally, takeovers, time.monotonic() - began)


def _machines(campaign: Campaign, folder: Path, stack: contextlib.ExitStack) -> list[Machine]:
    """Start etcd and two machines with a scheduler each."""
    # The names of network namespaces are files, which end with this mount namespace.
    os.makedirs(_NAMES, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "quire-netns", _NAMES], check=True)
    _ip("link add quire type bridge")
    _ip(f"addr add {_NETWORK}.1/24 dev quire")
    for link in ("quire", "lo"):
        _ip(f"link set {link} up")
    store = stack.enter_context(etcd(folder, f"{_NETWORK}.1")).address
    addresses = {"machine-a": f"{_NETWORK}.2", "machine-b": f"{_NETWORK}.3"}
    machines = []
    for name, address in addresses.items():
        others = ",".join(f"tcp://{each}:5703" for each in addresses.values() if each != address)
        flags = (
            *(f"--frontend-address=tcp://{address}:5701", f"--worker-address=tcp://{address}:5702"),
            *(f"--standby-address=tcp://{address}:5703", f"--standby-of={others}"),
            *(f"--leader-lease=etcd://{store}/quire", f"--leader-lease-s={campaign.lease_s}"),
            *(f"--journal={folder}/{name}", f"--journal-sync={campaign.journal_sync}", "--record-dir=off"),
            *(f"--keys={folder}/keys/scheduler", f"--max-num-seqs={max(64, campaign.num_streams)}"),
        )
        machine = Machine(name, address, flags, folder)
        machine.connect()
        machine.start()
        machines.append(machine)
    stack.callback(_stop, machines)
    return machines


def _stop(machines: list[Machine]) -> None:
    for machine in machines:
        assert machine.process is not None
        machine.process.kill()
        machine.process.wait()
        for path in machine.logs:
            print(f"{path.name}:\n{path.read_text()}", file=sys.stderr)


async def _strike_under_load(
    campaign: Campaign, machines: list[Machine], service: Service, load: Load
) -> list[tuple[Fault, KillRecord]]:
    rng = random.Random(campaign.seed)
    kinds = list(campaign.kinds)
    rng.shuffle(kinds)
    until = time.monotonic() + 60 * campaign.minutes
    streaming = asyncio.create_task(load.run())
    faults: list[tuple[Fault, KillRecord]] = []
    try:
        await asyncio.wait_for(load.flows.wait(), PATIENCE_S)
        for fault in cycle(kinds):
            await _until_ready(service)
            # Not since the fault, because messages from before it may arrive later.
            await until_all_get_on(load, time.time())
            if time.monotonic() > until or streaming.done():
                break
            leader, standby = sorted(machines, key=Machine.last_number, reverse=True)
            began = time.monotonic()
            record = KillRecord(time.time(), [each for each in load.live.values() if each.tokens])
            faults.append((fault, record))
            await asyncio.to_thread(_strike, fault, leader, standby)
            await asyncio.wait({streaming}, timeout=campaign.interval_s - (time.monotonic() - began))
    finally:
        load.stop()
        await streaming
    return faults


def _strike(fault: Fault, leader: Machine, standby: Machine) -> None:
    """Take the leader away, and repair what does not repair itself."""
    assert leader.process is not None
    match fault:
        case Fault.KILL:
            leader.process.kill()
            leader.process.wait()
            leader.start()
        case Fault.STOP:
            leader.process.send_signal(signal.SIGSTOP)
            time.sleep(AWAY_S)
            leader.process.send_signal(signal.SIGCONT)
        case Fault.CUT:
            leader.cut()
            time.sleep(AWAY_S)
            leader.mend()
        case Fault.EXIT:
            leader.process.terminate()
            assert leader.process.wait(PATIENCE_S) == 0
            leader.start()
        case Fault.COMMAND:
            keys = next(flag for flag in standby.flags if flag.startswith("--keys="))
            subprocess.run(
                [*QUIRE, "scheduler", f"--take-over=tcp://{standby.address}:5703", keys],
                check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S,
            )  # fmt: skip


async def _until_ready(service: Service) -> None:
    """Wait until a standby has the whole journal and both workers are connected."""

    def is_ready() -> bool:
        with contextlib.suppress(OSError):
            return service.metric("quire_standby_ready") == 1 and service.metric("quire_workers") == 2
        return False

    await asyncio.to_thread(_until, is_ready, "a standby has the whole journal, and two workers are connected")


def _until(holds: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            if holds():
                return
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.1)


def main() -> int:
    """Run one campaign in namespaces of its own; print and store its results."""
    if _INSIDE not in os.environ:
        inside = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        environ = {**os.environ, _INSIDE: "1"}
        return subprocess.call([*inside, sys.executable, "-m", "checks.chaos.takeovers", *sys.argv[1:]], env=environ)
    parser = command.parser("checks.chaos.takeovers", __doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--interval-s", type=float, default=20.0, help="minimum time between two faults")
    parser.add_argument("--lease-s", type=float, default=2.0)
    parser.add_argument("--journal-sync", default="standby")
    parser.add_argument("--compared-share", type=float, default=1.0, help="share of streams that are compared")
    parser.add_argument("--faults", nargs="*", choices=[fault.name.lower() for fault in Fault], help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    campaign = Campaign(
        num_streams=options.streams,
        max_tokens=options.max_tokens,
        minutes=options.minutes,
        interval_s=options.interval_s,
        lease_s=options.lease_s,
        journal_sync=options.journal_sync,
        seed=options.seed,
        compared_share=options.compared_share,
        kinds=tuple(Fault[name.upper()] for name in options.faults or Fault.__members__),
    )
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as folder:
        command.tell(run(campaign, Path(folder)).figures(), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
