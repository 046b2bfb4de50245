"""The manifests that deploy/kubernetes renders to, as Kubernetes would read them."""

import functools
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
TOOLS = ROOT / "build" / "kube" / "bin"
EXAMPLES = tuple(sorted(path.name for path in (KUBERNETES / "examples").iterdir()))
SECRETS = frozenset(
    {"quire-keys-frontend", "quire-keys-scheduler", "quire-keys-worker", "quire-allowed-workers"}
    | {"quire-allowed-frontends", "quire-allowed-schedulers", "quire-tls", "quire-principals"}
)
"""Secrets that an operator makes (deploy/kubernetes/README.md)."""
CLAIMS = frozenset({"quire-model"})
"""Claims that an operator makes (deploy/kubernetes/model)."""

needs_tools = pytest.mark.skipif(
    not (TOOLS / "kubectl").exists(), reason="kubectl is not installed; run make kube-tools"
)

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod that a workload makes."""

    name: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def role(self) -> str:
        """Its part in the cell: frontend, scheduler, worker or collector."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def cell(self) -> str:
        """The cell to which it belongs."""
        return self.labels.get("app.kubernetes.io/instance", "")

    @property
    def container(self) -> Mapping[str, Any]:
        """Its only container."""
        (container,) = self.spec["containers"]
        return container  # type: ignore[no-any-return]

    def variables(self) -> dict[str, Any]:
        """Return the environment: the text of a variable, or where its value comes from."""
        return {each["name"]: each.get("value", each.get("valueFrom")) for each in self.container.get("env", [])}

    def ports(self) -> dict[str, int]:
        """Return the ports by name."""
        return {each["name"]: each["containerPort"] for each in self.container.get("ports", [])}


@functools.cache
def rendered(example: str) -> str:
    """Return the objects that `kubectl kustomize` renders for an example."""
    return kustomized(KUBERNETES / "examples" / example)


def kustomized(folder: Path) -> str:
    """Return the objects that `kubectl kustomize` renders for a folder."""
    command = [str(TOOLS / "kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def objects(example: str) -> tuple[Object, ...]:
    """Return the objects of an example."""
    return tuple(yaml.load_all(rendered(example), Loader=yaml.CSafeLoader))


def of_kind(example: str, kind: str) -> list[Object]:
    """Return the objects of a kind."""
    return [each for each in objects(example) if each["kind"] == kind]


def pods(example: str) -> Iterator[Pod]:
    """Yield the pod of each workload in an example."""
    for each in objects(example):
        spec = each.get("spec", {})
        if each["kind"] in ("Deployment", "StatefulSet"):
            template = spec["template"]
        elif each["kind"] == "LeaderWorkerSet":
            template = spec["leaderWorkerTemplate"]["workerTemplate"]
        else:
            continue
        yield Pod(each["metadata"]["name"], template["metadata"]["labels"], template["spec"])


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects an object with these labels."""
    wanted = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions), "no other operator is used"
    return wanted and all(labels.get(each["key"]) in each["values"] for each in expressions)
