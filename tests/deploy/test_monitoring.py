"""The ServiceMonitor, as the Prometheus operator reads it: a real Prometheus has one target per cell."""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from measure.testbed.service import free_ports
from tests.deploy.manifests import needs_tools, of_kind, pods

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    needs_tools,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian package prometheus)"),
]
_META = "__meta_kubernetes"


def test_prometheus_has_one_target_per_cell(tmp_path: Path) -> None:
    """Two cells of three front ends each: two targets, at the Services, with the labels that queries read."""
    (monitor,) = of_kind("eight-gpus", "ServiceMonitor")
    found = list(_discovered(pods_per_cell=3))
    with _prometheus(tmp_path, monitor["spec"], found) as address:
        labels = [each["labels"] for each in _targets(address)]

    assert len(found) == 6 * 3, "a target per pod and port"
    assert sorted(labels, key=lambda each: each["cell"]) == [
        {
            "job": "quire", "cell": cell, "service": f"{cell}-quire-frontend", "namespace": "quire",
            "instance": f"{cell}-quire-frontend.quire.svc:8080",
        }
        for cell in ("a", "b")
    ]  # fmt: skip


def _discovered(pods_per_cell: int) -> Iterator[dict[str, Any]]:
    """Yield the targets that Prometheus discovers (role endpoints): one per pod and port of each Service."""
    front_ends = {pod.cell: pod for pod in pods("eight-gpus") if pod.role == "frontend"}
    services = [each for each in of_kind("eight-gpus", "Service") if each["metadata"]["name"].endswith("frontend")]
    for service in services:
        own = service["metadata"]["labels"]
        front_end = front_ends[own["app.kubernetes.io/instance"]]
        for number in range(pods_per_cell):
            for port in service["spec"]["ports"]:
                name = f"{front_end.name}-{number}"
                yield {
                    "targets": [f"10.0.{services.index(service)}.{number}:{front_end.ports()[port['targetPort']]}"],
                    "labels": {
                        f"{_META}_namespace": service["metadata"]["namespace"],
                        f"{_META}_service_name": service["metadata"]["name"],
                        f"{_META}_endpoint_port_name": port["name"],
                        f"{_META}_endpoint_address_target_kind": "Pod",
                        f"{_META}_endpoint_address_target_name": name,
                        f"{_META}_pod_name": name,
                        f"{_META}_pod_container_name": front_end.container["name"],
                        f"{_META}_pod_phase": "Running",
                        **{f"{_META}_service_label_{_plain(key)}": value for key, value in own.items()},
                    },
                }


def _relabelings(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the operator's rules for a ServiceMonitor: its own rules, then the object's."""
    (endpoint,) = spec["endpoints"]
    label = f"{_META}_service_label_"
    kept = {label + _plain(key): value for key, value in spec["selector"]["matchLabels"].items()}
    kept |= {f"{_META}_endpoint_port_name": endpoint["port"]}
    named = {"namespace": "namespace", "service_name": "service", "pod_name": "pod", "pod_container_name": "container"}
    return [
        *({"action": "keep", "source_labels": [key], "regex": value} for key, value in kept.items()),
        *({"source_labels": [f"{_META}_{key}"], "target_label": value} for key, value in named.items()),
        {"source_labels": [label + _plain(spec["jobLabel"])], "target_label": "job"},
        {"target_label": "endpoint", "replacement": endpoint["port"]},
        *({_snake(key): value for key, value in each.items()} for each in endpoint["relabelings"]),
    ]


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", r"_\1", name).lower()


@contextmanager
def _prometheus(folder: Path, spec: dict[str, Any], found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Run Prometheus with a job for the ServiceMonitor; yields its URL."""
    (port,) = free_ports(1)
    (folder / "found.json").write_text(json.dumps(found))
    job = {
        "job_name": "serviceMonitor/quire/quire/0",
        "metrics_path": spec["endpoints"][0]["path"],
        "scrape_interval": spec["endpoints"][0]["interval"],
        "scrape_timeout": spec["endpoints"][0]["interval"],
        "file_sd_configs": [{"files": [str(folder / "found.json")]}],
        "relabel_configs": _relabelings(spec),
    }
    (folder / "prometheus.json").write_text(json.dumps({"scrape_configs": [job]}))
    assert PROMETHEUS is not None
    command = [
        PROMETHEUS, f"--config.file={folder / 'prometheus.json'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _targets(address: str) -> list[dict[str, Any]]:
    """Return Prometheus's scrape targets once there are any; discovery takes five seconds."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            with opener.open(f"{address}/api/v1/targets?state=active", timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["activeTargets"]
        except OSError:
            found = []
        if found:
            return found
        time.sleep(0.2)
    pytest.fail("Prometheus has no target")
