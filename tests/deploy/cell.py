"""A cell that is started from the rendered manifests, with clients that generate, and the operator's actions on it."""

import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import trustme
import yaml

from measure.testbed.service import until
from quire import Client, errors
from quire_server.cli.keys import add, add_principal, create, revoke
from shared.model_path import resolve_model
from tests.deploy.hub import Hub, serving
from tests.deploy.manifests import KUBERNETES, Pod, kustomized
from tests.deploy.node import NETWORK, Node, Running

DEMO = resolve_model("demo", weights=True)
_TOKENS = 40
_CLIENTS = 4
_PATIENCE_S = 600
_ANONYMOUS = '\n[anonymous]\ntenants = ["*"]\ncache_scopes = ["*"]\n'
"""Text that deploy/kubernetes/README.md appends to the principals file, because the load's clients have no token."""
_HUB_TOKEN = "hf_drill"
_PROMPTS = tuple(f"Tale {number}:" for number in range(6))


class Load:
    """Clients that generate one response after the other through the ready front ends."""

    def __init__(self, ca: bytes) -> None:
        self._ca = ca
        self.targets: list[str] = []
        """Addresses of the Service's front ends; always replaced as a whole."""
        self.lost: set[str] = set()
        """Addresses of front ends that died."""
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._answered = threading.Condition()
        self._expected: dict[str, tuple[list[int], str]] = {}
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def learn(self) -> None:
        """Learn the right answers from the undisturbed service."""
        with self._client(self.targets[0]) as client:
            for prompt in _PROMPTS:
                self._expected[prompt] = _generated(client, prompt)

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
            thread.join(_PATIENCE_S)

    def more(self, count: int) -> None:
        """Wait for further answers to requests that were sent from now on by each client."""
        with self._answered:
            wanted = self.answers["ok"] + count + _CLIENTS
            if not self._answered.wait_for(lambda: self.answers["ok"] >= wanted, _PATIENCE_S):
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
                    found = _generated(client, prompt)
            except errors.UnavailableError as error:
                if target in self.lost:  # the client retries through the Kubernetes Service
                    self.answers["tried again"] += 1
                else:
                    self.wrong.append(str(error))
                continue
            except errors.QuireError as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            if found != self._expected[prompt]:
                self.wrong.append(f"{prompt!r}: {found} instead of {self._expected[prompt]}")
                continue
            with self._answered:
                self.answers["ok"] += 1
                self._answered.notify_all()

    def _client(self, address: str) -> Client:
        return Client(f"{address}:50051", credentials=grpc.ssl_channel_credentials(self._ca))


def _generated(client: Client, prompt: str) -> tuple[list[int], str]:
    """Return a response's tokens and text, joined from its parts."""
    tokens: list[int] = []
    text = ""
    for delta in client.generate(prompt, max_tokens=_TOKENS, temperature=0.0, resumable=True, timeout=_PATIENCE_S):
        if delta.first_index != len(tokens):
            raise errors.QuireError(f"token {delta.first_index} came after {len(tokens)} tokens")
        tokens += delta.token_ids
        text += delta.text
    return tokens, text


class Cell:
    """A cell and the operator's actions on it."""

    def __init__(self, folder: Path, example: str, *components: str) -> None:
        self._folder = folder
        self._keys = folder / "keys"
        create(self._keys)
        self.principals = folder / "principals.toml"
        self.operator_token = add_principal(self.principals, "operator", is_admin=True)
        with self.principals.open("a", encoding="utf-8") as file:
            file.write(_ANONYMOUS)
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(authority.cert_pem.bytes())
        certificate = authority.issue_cert("localhost", *(f"{NETWORK}.{number}" for number in range(2, 60)))
        manifests = _render(example, components)
        maps = {each["metadata"]["name"]: each["data"] for each in manifests if each["kind"] == "ConfigMap"}
        secrets: dict[str, Mapping[str, bytes]] = {
            "quire-keys-scheduler": {"own.key_secret": (self._keys / "scheduler" / "own.key_secret").read_bytes()},
            "quire-keys-worker": _files(self._keys / "worker"),
            "quire-keys-frontend": _files(self._keys / "frontend"),
            "quire-allowed-workers": self._allowed("workers"),
            "quire-allowed-frontends": self._allowed("frontends"),
            "quire-hub": {"token": _HUB_TOKEN.encode()},
            "quire-principals": {"principals.toml": self.principals.read_bytes()},
            "quire-tls": {
                "tls.crt": b"".join(blob.bytes() for blob in certificate.cert_chain_pems),
                "tls.key": certificate.private_key_pem.bytes(),
            },
        }
        self.node = Node(folder, secrets, maps)
        if example != "one-cell-cpu":
            self._download()
        self._specs = {
            each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]
            for each in manifests
            if each["kind"] in ("Deployment", "StatefulSet")
        }
        self.load = Load(authority.cert_pem.bytes())
        self.pods: dict[str, list[Running]] = {"frontend": [], "worker": []}
        """Pods of the Deployments by role, oldest first."""
        self.scheduler = self._start("scheduler")
        self.node.ready(self.scheduler)
        for role in ("worker", "frontend"):
            for _ in range(self._specs[role]["replicas"]):
                self.add(role)

    def _allowed(self, domain: str) -> dict[str, bytes]:
        return _files(self._keys / "scheduler" / "allowed" / domain)

    def _download(self) -> None:
        """Run the Job that downloads the model from a local hub with the bundled model under the model's name."""
        manifests = yaml.safe_load_all(kustomized(KUBERNETES / "model"))
        (template,) = (each["spec"]["template"] for each in manifests if each["kind"] == "Job")
        (container,) = template["spec"]["containers"]
        name = container["args"][1]
        with serving(Hub({name: DEMO}, token=_HUB_TOKEN, host=f"{NETWORK}.1")) as hub:
            container["env"].append({"name": "HF_ENDPOINT", "value": hub.address})
            pod = Pod("quire-model-download", template["metadata"]["labels"], template["spec"])
            job = self.node.start(pod, "quire-scheduler")
            code = job.process.wait(_PATIENCE_S)
            if code or not hub.num_sent:
                raise RuntimeError(f"the Job ended with exit code {code}: {job.log.read_text()[-2000:]}")
            self.node.remove(job)

    def _start(self, role: str) -> Running:
        template = self._specs[role]["template"]
        pod = Pod(f"quire-{role}", template["metadata"]["labels"], template["spec"])
        image = pod.container["image"].partition(":")[0].removesuffix("-cpu")
        return self.node.start(pod, image, suffix="0" if role == "scheduler" else "")

    def add(self, role: str) -> None:
        """Start a pod of a Deployment. When the pod is ready, it joins its Service."""
        pod = self._start(role)
        self.node.ready(pod)
        self.pods[role].append(pod)
        self._announce()

    def remove(self, role: str) -> None:
        """Remove a Deployment's oldest pod from its Service, and stop it."""
        pod = self.pods[role].pop(0)
        self._announce()
        _expect_zero(self.node.stop(pod))

    def lose(self, role: str) -> None:
        """Kill the oldest pod of a Deployment, which starts another."""
        pod = self.pods[role].pop(0)
        if role == "frontend":
            self.load.lost.add(pod.address)
        self.node.kill(pod)
        self._announce()
        self.add(role)

    def roll(self, role: str) -> None:
        """Replace all pods of a Deployment, as its strategy allows it."""
        replicas, strategy = self._specs[role]["replicas"], self._specs[role]["strategy"]["rollingUpdate"]
        old, new = len(self.pods[role]), 0
        while old or new < replicas:
            if new < replicas and old + new < replicas + strategy["maxSurge"]:
                self.add(role)
                new += 1
            elif old and old + new > replicas - strategy["maxUnavailable"]:
                self.remove(role)
                old -= 1
            else:
                raise RuntimeError(f"{role}: the strategy {strategy} allows neither another pod nor one less")

    def _announce(self) -> None:
        self.load.targets = [each.address for each in self.pods["frontend"]]

    # ---------------------------------------------------------------- drills

    def scale_workers(self) -> None:
        """`kubectl apply -k OVERLAY`, in which `replicas` of quire-worker is 2, and then 1 again."""
        self.add("worker")
        self.load.more(12)
        self.remove("worker")
        self.load.more(12)

    def upgrade_workers(self) -> None:
        """`kubectl rollout restart deployment/quire-worker`."""
        self.roll("worker")
        self.load.more(12)

    def upgrade_scheduler(self) -> None:
        """`kubectl rollout restart statefulset/quire-scheduler`."""
        _expect_zero(self.node.stop(self.scheduler))
        self._renew(self.scheduler)
        self.load.more(12)

    def upgrade_frontends(self) -> None:
        """`kubectl rollout restart deployment/quire-frontend`."""
        self.roll("frontend")
        self.load.more(12)

    def rotate_worker_key(self) -> None:
        """`quire keys add keys worker-2`."""
        add(self._keys, "worker-2", "worker")
        loaded = self._count_loaded_keys()
        self.node.write("quire-allowed-workers", self._allowed("workers"))
        self.node.write("quire-keys-worker", _files(self._keys / "worker-2"))
        until(lambda: self._count_loaded_keys() > loaded, "the scheduler has loaded the new key")
        self.roll("worker")
        revoke(self._keys, "worker", only_old=False)
        self.node.write("quire-allowed-workers", self._allowed("workers"))
        self.load.more(12)

    def lose_a_worker(self) -> None:
        """`kubectl delete pod --grace-period=0 --force WORKER`.

        The only worker dies; its Deployment starts another.
        """
        self.lose("worker")
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
        self.lose("frontend")
        self.load.more(12)

    def _renew(self, old: Running) -> None:
        shutil.rmtree(self._folder / old.name)
        self.scheduler = self._start("scheduler")
        self.node.ready(self.scheduler)

    def _count_loaded_keys(self) -> int:
        return self.scheduler.log.read_bytes().count(b"allowed keys loaded")


_CHANGES = {
    # The worker has one core, so the time limit for waiting requests must exceed the model's loading time on a busy
    # machine.
    "one-cell-cpu": f"""
  - target: {{kind: StatefulSet, name: quire-scheduler}}
    patch: |
      - op: add
        path: /spec/template/spec/containers/0/env/-
        value: {{name: QUIRE_WORKER_WAIT_S, value: "{_PATIENCE_S}"}}
  - target: {{kind: Deployment, name: quire-worker}}
    patch: |
      - {{op: replace, path: /spec/template/spec/containers/0/resources/limits/cpu, value: "1"}}
""",
    # A CPU replaces the GPU.
    "one-gpu-node": """
  - patch: |
      apiVersion: apps/v1
      kind: Deployment
      metadata: {name: quire-worker}
      spec: {template: {spec: {containers: [{name: worker, env: [{name: QUIRE_DEVICE, value: cpu}]}]}}}
""",
}
"""By example: the patches for this machine."""


def _render(example: str, components: Sequence[str]) -> list[dict[str, Any]]:
    """Return the manifests of an example with further components."""
    build = KUBERNETES.parents[1] / "build"
    build.mkdir(exist_ok=True)
    added = ", ".join(f"../../deploy/kubernetes/components/{each}" for each in components)
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=build) as overlay:
        (Path(overlay) / "kustomization.yaml").write_text(
            f"resources: [../../deploy/kubernetes/examples/{example}]\n"
            f"components: [{added}]\n"
            f"patches:{_CHANGES[example]}"
        )
        return list(yaml.safe_load_all(kustomized(Path(overlay))))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _expect_zero(code: int) -> None:
    if code:
        raise RuntimeError(f"a pod ended with exit code {code}")
