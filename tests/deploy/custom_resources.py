"""Checks custom resources against their projects' published schemas in `crds/`.

    python -m tests.deploy.custom_resources FOLDER

writes `crds/` anew. FOLDER has a clone of each repository of `SOURCES`, under the last part of its name. The check is
strict: an unknown field is an error, as with `kubectl --validate=strict`. Rules in CEL (`x-kubernetes-validations`) are
not evaluated.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.manifests import Object, objects

CRDS = Path(__file__).with_name("crds")


@dataclass(frozen=True, slots=True)
class Source:
    """A CustomResourceDefinition in a release of a project."""

    repository: str
    release: str
    path: str


_GATEWAY = "config/crd/standard/gateway.networking.k8s.io_"
_MONITORING = "example/prometheus-operator-crd/monitoring.coreos.com_"
SOURCES = {
    "Certificate": Source("cert-manager/cert-manager", "v1.21.1", "deploy/crds/cert-manager.io_certificates.yaml"),
    "GRPCRoute": Source("kubernetes-sigs/gateway-api", "v1.6.1", f"{_GATEWAY}grpcroutes.yaml"),
    "Gateway": Source("kubernetes-sigs/gateway-api", "v1.6.1", f"{_GATEWAY}gateways.yaml"),
    "HTTPRoute": Source("kubernetes-sigs/gateway-api", "v1.6.1", f"{_GATEWAY}httproutes.yaml"),
    "InferencePool": Source(
        "kubernetes-sigs/gateway-api-inference-extension", "v1.6.0",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
    "LeaderWorkerSet": Source(
        "kubernetes-sigs/lws", "v0.10.0", "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"
    ),
    "PrometheusRule": Source(
        "prometheus-operator/prometheus-operator", "v0.93.0", f"{_MONITORING}prometheusrules.yaml"
    ),
    "ScaledObject": Source("kedacore/keda", "v2.20.2", "config/crd/bases/keda.sh_scaledobjects.yaml"),
    "ServiceMonitor": Source(
        "prometheus-operator/prometheus-operator", "v0.93.0", f"{_MONITORING}servicemonitors.yaml"
    ),
}  # fmt: skip
"""Source of each kind's schema. All of these projects have the licence Apache-2.0."""


def custom_objects(example: str) -> Iterator[Object]:
    """Yield the objects of an example that Kubernetes itself does not define."""
    for each in objects(example):
        if each["kind"] in SOURCES:
            yield each


def errors(each: Object) -> list[str]:
    """Return how an object differs from the schema of its version and kind: the path and what is wrong."""
    version = each["apiVersion"]
    found = _schemas(each["kind"]).get(version)
    if found is None:
        return [f"apiVersion: {version} has no {each['kind']}"]
    problems = jsonschema.Draft202012Validator(found).iter_errors(each)
    return [f"{problem.json_path}: {problem.message}" for problem in problems]


@functools.cache
def _schemas(kind: str) -> dict[str, Any]:
    """Return the strict schema for each version of a kind that a cluster serves."""
    return {
        version: _strict(schema)
        for version, schema in json.loads((CRDS / f"{kind}.json").read_text("utf-8"))["versions"].items()
    }


def _strict(schema: Any) -> Any:
    """Return a schema that refuses unknown fields, as the API server does with strict validation."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(pattern := schema.get("pattern"), str) and "(?i)" in pattern:
        strict["pattern"] = "(?i)" + pattern.replace("(?i)", "")  # Go allows this flag anywhere in a pattern.
    if schema.get("x-kubernetes-int-or-string"):
        strict["type"] = ["integer", "string"]
    if "properties" in schema and isinstance(schema["properties"], dict) and schema.get("type") == "object":
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if not open_ended:
            strict["additionalProperties"] = False
    return strict


def vendored(source: Source, published: str) -> dict[str, Any]:
    """Return what `crds/` stores of a CustomResourceDefinition: its origin, and each served version's schema."""
    spec = yaml.load(published, Loader=yaml.CSafeLoader)["spec"]
    versions = {}
    for version in spec["versions"]:
        if version["served"]:
            schema = _without_prose(version["schema"]["openAPIV3Schema"])
            # These fields are common to all Kubernetes objects, so the definition omits them.
            schema["properties"]["metadata"] = {"type": "object"}
            schema["properties"].pop("status", None)
            versions[f"{spec['group']}/{version['name']}"] = schema
    origin = {"repository": source.repository, "release": source.release, "path": source.path, "licence": "Apache-2.0"}
    return {**origin, "versions": versions}


def _without_prose(schema: Any) -> Any:
    """Return a schema without descriptions and rules in CEL. A property may have the name `description`: it stays."""
    if isinstance(schema, list):
        return [_without_prose(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_prose(value)
        for key, value in schema.items()
        if key != "x-kubernetes-validations" and not (key == "description" and isinstance(value, str))
    }


def main(folder: str) -> int:
    """Write the schemas from the clones in a folder."""
    for kind, source in SOURCES.items():
        clone = Path(folder) / source.repository.rpartition("/")[2]
        command = ["git", "-C", str(clone), "show", f"{source.release}:{source.path}"]
        published = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        text = json.dumps(vendored(source, published), separators=(",", ":"))
        (CRDS / f"{kind}.json").write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
