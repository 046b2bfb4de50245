"""The component `standby`: two schedulers, of which the holder of a Lease object leads."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler_svc.main import check_leadership
from scheduler_svc.standby.stores import is_remote
from shared.config import FrontendConfig, SchedulerConfig, WorkerConfig, addresses
from shared.config_sources import ConfigSources
from tests.deploy.manifests import ROOT, SECRETS, Pod, kustomized, matches, needs_tools
from tests.deploy.test_manifests import VERSIONS, validation_errors

pytestmark = needs_tools

_PREFIX = "blue-"
_PODS = [f"{_PREFIX}quire-scheduler-{number}.{_PREFIX}quire-scheduler" for number in (0, 1)]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Return the objects of a CPU cell with the component and with a prefix."""
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=ROOT / "build") as folder:
        (Path(folder) / "kustomization.yaml").write_text(
            f"namePrefix: {_PREFIX}\n"
            "resources: [../../deploy/kubernetes/examples/one-cell-cpu]\n"
            "components: [../../deploy/kubernetes/components/standby]\n"
        )
        return list(yaml.safe_load_all(kustomized(Path(folder))))


def _of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] == kind]


def _pods(found: list[dict[str, Any]]) -> dict[str, Pod]:
    made = [
        Pod(each["metadata"]["name"], each["spec"]["template"]["metadata"]["labels"], each["spec"]["template"]["spec"])
        for each in found
        if each["kind"] in ("Deployment", "StatefulSet")
    ]
    return {pod.role: pod for pod in made}


def _environment(pod: Pod) -> dict[str, str]:
    """Return a pod's variables of Quire, expanded as Kubernetes does: from variables that stand before."""
    values: dict[str, str] = {}
    for name, value in pod.variables().items():
        if isinstance(value, str):
            for other, text in values.items():
                value = value.replace(f"$({other})", text)
            values[name] = value
    assert not any("$(" in value for value in values.values())
    return {name: value for name, value in values.items() if name not in ("QUIRE_CONFIG", "QUIRE_PULSE_FILE")}


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(found: list[dict[str, Any]], version: str) -> None:
    """No unknown field and no wrong type."""
    assert validation_errors(found, version) == ""


def test_front_ends_and_workers_know_both_schedulers(found: list[dict[str, Any]]) -> None:
    """The names are those of the pods of the StatefulSet under its headless Service."""
    made = _pods(found)
    (scheduler,) = _of_kind(found, "StatefulSet")
    (service,) = (each for each in _of_kind(found, "Service") if each["metadata"]["name"].endswith("quire-scheduler"))
    assert scheduler["spec"]["replicas"] == len(_PODS)
    assert scheduler["spec"]["serviceName"] == service["metadata"]["name"] == _PODS[0].partition(".")[2]
    assert service["spec"]["clusterIP"] == "None"
    assert {port["port"] for port in service["spec"]["ports"]} == set(made["scheduler"].ports().values())
    assert all(name.partition(".")[0][:-2] == scheduler["metadata"]["name"] for name in _PODS)

    for role, config, setting, port in (
        ("frontend", FrontendConfig, "frontend_address", 5701),
        ("worker", WorkerConfig, "worker_address", 5702),
        ("scheduler", SchedulerConfig, "standby_of", 5703),
    ):
        settings = ConfigSources(argparse.Namespace(), _environment(made[role])).make(config)
        assert addresses(getattr(settings, setting)) == [f"tcp://{name}:{port}" for name in _PODS]


def test_the_lease_object_has_the_name_of_the_cell(found: list[dict[str, Any]]) -> None:
    """The scheduler's account may use it, and the settings are accepted."""
    pod = _pods(found)["scheduler"]
    settings = ConfigSources(argparse.Namespace(), _environment(pod)).make(SchedulerConfig)
    assert is_remote(settings.leader_lease)
    assert settings.leader_lease == f"kubernetes:///{_PREFIX}quire-scheduler"
    check_leadership(settings)
    (role,), (binding,) = _of_kind(found, "Role"), _of_kind(found, "RoleBinding")
    assert role["rules"] == [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "get", "update"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = {"kind": "ServiceAccount", "name": pod.spec["serviceAccountName"], "namespace": "quire"}
    assert binding["subjects"] == [account]
    assert pod.spec["automountServiceAccountToken"]


def test_schedulers_reach_each_other_on_different_nodes(found: list[dict[str, Any]]) -> None:
    """A policy opens their port, one disruption is allowed at a time, and each may be replaced without the other."""
    pod = _pods(found)["scheduler"]
    (rule,) = pod.spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert matches(rule["labelSelector"], pod.labels)
    (budget,) = (
        each for each in _of_kind(found, "PodDisruptionBudget") if matches(each["spec"]["selector"], pod.labels)
    )
    assert budget["spec"]["maxUnavailable"] == 1
    policies = [
        each["spec"] for each in _of_kind(found, "NetworkPolicy") if matches(each["spec"]["podSelector"], pod.labels)
    ]
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        opened = [
            rule
            for policy in policies
            for rule in policy.get(direction, [])
            if {"protocol": "TCP", "port": "standbys"} in rule["ports"]
        ]
        assert any(matches(peer["podSelector"], pod.labels) for rule in opened for peer in rule[peers])


def test_the_operator_makes_every_secret(found: list[dict[str, Any]]) -> None:
    """The README's list is complete."""
    for pod in _pods(found).values():
        assert {volume["secret"]["secretName"] for volume in pod.spec["volumes"] if "secret" in volume} <= SECRETS
