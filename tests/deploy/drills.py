"""The drills of docs/operations.md, on a cell that is started from the rendered manifests.

    unshare --net --mount --pid --fork --kill-child --mount-proc python -m tests.deploy.drills

Clients generate without a pause while workers are added and removed, each kind of process is upgraded, keys are
rotated, and pods are lost. Every answer must be that of an undisturbed service. It prints one line per drill, and the
totals as JSON.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import trustme
import yaml

from quire import Client, errors
from quire_server.cli.keys import add, create, revoke
from tests.deploy.manifests import KUBERNETES, TOOLS, Pod
from tests.deploy.node import NETWORK, Node, Running

_TOKENS = 40
_CLIENTS = 4
_PROMPTS = tuple(f"Tale {number}:" for number in range(6))


class Load:
    """Clients that generate one answer after the other through the front ends that are ready."""

    def __init__(self, ca: bytes) -> None:
        self._ca = ca
        self.targets: list[str] = []
        """Addresses of the front ends that the Service has; exchanged as a whole."""
        self.lost: set[str] = set()
        """Addresses of front ends that died."""
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._expected: dict[str, str] = {}
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def learn(self) -> None:
        """Learn the right answers from the undisturbed service."""
        with self._client(self.targets[0]) as client:
            for prompt in _PROMPTS:
                self._expected[prompt] = client.generate(prompt, max_tokens=_TOKENS, temperature=0.0).result().text

    def begin(self) -> None:
        """Start the clients."""
        self._threads = [
            threading.Thread(target=self._generate, args=(number,), daemon=True) for number in range(_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Wait for the last answers."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def more(self, count: int) -> None:
        """Wait for further answers."""
        wanted, end = self.answers["ok"] + count, time.monotonic() + 240
        while self.answers["ok"] < wanted and time.monotonic() < end:
            time.sleep(0.1)
        if self.answers["ok"] < wanted:
            raise RuntimeError(f"no more answers: {self.answers}, {self.wrong[:3]}")

    def _generate(self, number: int) -> None:
        turn = number
        while not self._stopping.is_set():
            turn += 1
            prompt = _PROMPTS[turn % len(_PROMPTS)]
            targets = self.targets
            target = targets[turn % len(targets)]
            try:
                with self._client(target) as client:
                    answer = client.generate(
                        prompt, max_tokens=_TOKENS, temperature=0.0, resumable=True, timeout=120
                    ).result()
            except errors.UnavailableError as error:
                if target in self.lost:  # the client tries again through the Service
                    self.answers["tried again"] += 1
                else:
                    self.wrong.append(str(error))
                continue
            except errors.QuireError as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            if answer.text != self._expected[prompt]:
                self.wrong.append(f"{prompt!r}: {answer.text!r} instead of {self._expected[prompt]!r}")
            else:
                self.answers["ok"] += 1

    def _client(self, address: str) -> Client:
        return Client(f"{address}:50051", credentials=grpc.ssl_channel_credentials(self._ca))


class Cell:
    """A cell and the operator's actions on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys = folder / "keys"
        create(self._keys)
        authority = trustme.CA()
        certificate = authority.issue_cert(*(f"{NETWORK}.{number}" for number in range(2, 60)))
        manifests = _render(folder)
        maps = {each["metadata"]["name"]: each["data"] for each in manifests if each["kind"] == "ConfigMap"}
        secrets: dict[str, Mapping[str, bytes]] = {
            "quire-keys-scheduler": {"own.key_secret": (self._keys / "scheduler" / "own.key_secret").read_bytes()},
            "quire-keys-worker": _files(self._keys / "worker"),
            "quire-keys-frontend": _files(self._keys / "frontend"),
            "quire-allowed-workers": self._allowed("workers"),
            "quire-allowed-frontends": self._allowed("frontends"),
            "quire-tls": {
                "tls.crt": b"".join(blob.bytes() for blob in certificate.cert_chain_pems),
                "tls.key": certificate.private_key_pem.bytes(),
            },
        }
        self.node = Node(folder, secrets, maps)
        self._templates = {
            each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"]
            for each in manifests
            if each["kind"] in ("Deployment", "StatefulSet")
        }
        self.load = Load(authority.cert_pem.bytes())
        self.frontends: list[Running] = []
        self.workers: list[Running] = []
        self.scheduler = self._start("scheduler")
        self.node.ready(self.scheduler)
        self.add_worker()
        self.add_frontend()
        self.add_frontend()
        self.load.learn()

    def _allowed(self, domain: str) -> dict[str, bytes]:
        return _files(self._keys / "scheduler" / "allowed" / domain)

    def _start(self, role: str) -> Running:
        template = self._templates[role]
        pod = Pod(f"quire-{role}", template["metadata"]["labels"], template["spec"])
        image = pod.container["image"].partition(":")[0].removesuffix("-cpu")
        return self.node.start(pod, image, suffix="0" if role == "scheduler" else "")

    def add_worker(self) -> None:
        """Start a worker, and wait until it is ready."""
        worker = self._start("worker")
        self.node.ready(worker)
        self.workers.append(worker)

    def remove_worker(self) -> None:
        """End the oldest worker."""
        _expect_zero(self.node.stop(self.workers.pop(0)))

    def add_frontend(self) -> None:
        """Start a front end, and send it clients when it is ready."""
        frontend = self._start("frontend")
        self.node.ready(frontend)
        self.frontends.append(frontend)
        self._announce()

    def remove_frontend(self) -> None:
        """Take the oldest front end from the Service, and end it."""
        frontend = self.frontends.pop(0)
        self._announce()
        _expect_zero(self.node.stop(frontend))

    def _announce(self) -> None:
        self.load.targets = [each.address for each in self.frontends]

    # ---------------------------------------------------------------- drills

    def scale_workers(self) -> None:
        """`kubectl apply -k OVERLAY`, in which `replicas` of quire-worker is 2, and then 1 again."""
        self.add_worker()
        self.load.more(12)
        self.remove_worker()
        self.load.more(12)

    def upgrade_workers(self) -> None:
        """`kubectl rollout restart deployment/quire-worker`."""
        self.add_worker()
        self.remove_worker()
        self.load.more(12)

    def upgrade_scheduler(self) -> None:
        """`kubectl rollout restart statefulset/quire-scheduler`."""
        _expect_zero(self.node.stop(self.scheduler))
        self._renew(self.scheduler)
        self.load.more(12)

    def upgrade_frontends(self) -> None:
        """`kubectl rollout restart deployment/quire-frontend`."""
        for _ in range(2):
            self.add_frontend()
            self.remove_frontend()
        self.load.more(12)

    def rotate_worker_key(self) -> None:
        """`quire keys add keys worker-2`."""
        add(self._keys, "worker-2", "worker")
        self.node.write("quire-allowed-workers", self._allowed("workers"))
        self.node.write("quire-keys-worker", _files(self._keys / "worker-2"))
        time.sleep(1.5)  # the scheduler looks every second
        self.upgrade_workers()
        revoke(self._keys, "worker", only_old=False)
        self.node.write("quire-allowed-workers", self._allowed("workers"))
        self.load.more(12)

    def lose_a_worker(self) -> None:
        """`kubectl delete pod --grace-period=0 --force WORKER`.

        The only worker dies; its Deployment starts another.
        """
        self.node.kill(self.workers.pop(0))
        self.add_worker()
        self.load.more(12)

    def lose_the_scheduler(self) -> None:
        """`kubectl delete pod --grace-period=0 --force quire-scheduler-0`.

        The StatefulSet starts it again with its volume.
        """
        self.node.kill(self.scheduler)
        self._renew(self.scheduler)
        self.load.more(12)

    def lose_a_frontend(self) -> None:
        """`kubectl delete pod --grace-period=0 --force FRONTEND`.

        Its clients get UNAVAILABLE, and try again on another front end.
        """
        frontend = self.frontends.pop(0)
        self.load.lost.add(frontend.address)
        self.node.kill(frontend)
        self._announce()
        self.add_frontend()
        self.load.more(12)

    def _renew(self, old: Running) -> None:
        shutil.rmtree(self._folder / old.name)
        self.scheduler = self._start("scheduler")
        self.node.ready(self.scheduler)


DRILLS: tuple[Callable[[Cell], None], ...] = (
    Cell.scale_workers, Cell.upgrade_workers, Cell.upgrade_scheduler, Cell.upgrade_frontends, Cell.rotate_worker_key,
    Cell.lose_a_worker, Cell.lose_the_scheduler, Cell.lose_a_frontend,
)  # fmt: skip


def _render(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests of a cell whose worker has one core."""
    overlay = KUBERNETES.parents[1] / "build" / "overlay"
    overlay.mkdir(parents=True, exist_ok=True)
    (overlay / "kustomization.yaml").write_text(
        "resources: [../../deploy/kubernetes/examples/one-cell-cpu]\n"
        "patches:\n"
        "  - target: {kind: Deployment, name: quire-worker}\n"
        "    patch: |\n"
        '      - {op: replace, path: /spec/template/spec/containers/0/resources/limits/cpu, value: "1"}\n'
    )
    text = subprocess.run(
        [str(TOOLS / "kubectl"), "kustomize", str(overlay)], check=True, capture_output=True, text=True
    ).stdout
    return list(yaml.safe_load_all(text))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _expect_zero(code: int) -> None:
    if code:
        raise RuntimeError(f"a pod ended with exit code {code}")


def main() -> int:
    """Run all drills."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        cell = Cell(Path(name))
        try:
            cell.load.begin()
            cell.load.more(4)
            for drill in DRILLS:
                began = time.monotonic()
                drill(cell)
                print(
                    f"{drill.__name__}: {time.monotonic() - began:.1f} s, {cell.load.answers['ok']} answers", flush=True
                )
            cell.load.end()
        finally:
            cell.node.end()
        print(json.dumps({"answers": cell.load.answers["ok"], "wrong": cell.load.wrong[:5]}))
    return 0 if not cell.load.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
