"""Ways of a model into a cluster: a Job, the cache of a node and an OCI image render, and only downloads leave it."""

import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import CLAIMS, EXAMPLES, KUBERNETES, ROOT, kustomized, needs_tools, of_kind, pods
from tests.deploy.test_manifests import VERSIONS, validation_errors

pytestmark = needs_tools

_WITH_A_CLAIM = [example for example in EXAMPLES if example != "one-cell-cpu"]


def _download() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(kustomized(KUBERNETES / "model"))}


def _overlay(component: str) -> list[dict[str, Any]]:
    """Return the objects of a CPU cell with a component of models."""
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=ROOT / "build") as folder:
        (Path(folder) / "kustomization.yaml").write_text(
            "resources: [../../deploy/kubernetes/examples/one-cell-cpu]\n"
            f"components: [../../deploy/kubernetes/components/{component}]\n"
        )
        return list(yaml.safe_load_all(kustomized(Path(folder))))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_is_valid_and_fills_the_claim_that_cells_read(version: str) -> None:
    """It writes as the user that reads, into the claim of the component, and has no more rights than other pods."""
    found = _download()
    spec = found["Job"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]

    assert validation_errors(list(found.values()), version) == ""
    assert found["PersistentVolumeClaim"]["metadata"]["name"] in CLAIMS
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == "quire-model"
    assert spec["securityContext"]["runAsUser"] == 10001
    assert container["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.parametrize("example", _WITH_A_CLAIM)
def test_an_example_serves_the_folder_that_the_job_fills(example: str) -> None:
    """The path in quire.toml is the download path, as seen through the component's mount."""
    (container,) = _download()["Job"]["spec"]["template"]["spec"]["containers"]
    command, _, folder = container["args"]
    settings = [tomllib.loads(each["data"]["quire.toml"]) for each in of_kind(example, "ConfigMap")
                if "quire.toml" in each["data"]]  # fmt: skip

    assert command == "download"
    assert {each["model"] for each in settings} == {folder}
    for pod in pods(example):
        if pod.role in ("frontend", "worker"):
            (mount,) = (each for each in pod.container["volumeMounts"] if each["name"] == "model")
            assert mount == {"name": "model", "mountPath": str(Path(folder).parent), "readOnly": True}


@pytest.mark.parametrize(("component", "versions"), [("model-cache", VERSIONS), ("model-image", VERSIONS[1:])])
def test_other_ways_are_valid(component: str, versions: tuple[str, ...]) -> None:
    """They render with a cell, whose front ends and workers mount the model read-only. Old versions know no images."""
    found = _overlay(component)

    for version in versions:
        assert validation_errors(found, version) == ""
    for each in found:
        if each["kind"] == "Deployment":
            spec = each["spec"]["template"]["spec"]
            (mount,) = (mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "model")
            assert mount["readOnly"]
            assert mount["mountPath"].startswith("/models")


def test_nodes_that_cache_a_model_run_its_readers() -> None:
    """The DaemonSet's selector matches that of front ends and workers, which mount its folder."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in _overlay("model-cache")}
    cache = found["DaemonSet", "quire-model"]["spec"]["template"]["spec"]
    (path,) = (each["hostPath"]["path"] for each in cache["volumes"] if "hostPath" in each)

    for name in ("quire-frontend", "quire-worker"):
        spec = found["Deployment", name]["spec"]["template"]["spec"]
        (volume,) = (each for each in spec["volumes"] if each["name"] == "model")
        assert spec["nodeSelector"] == cache["nodeSelector"]
        assert volume["hostPath"]["path"] == path


def test_only_downloads_leave_the_cluster() -> None:
    """Their policy is one, and no other names an address outside; private addresses are left out."""
    policies = [each for example in EXAMPLES for each in of_kind(example, "NetworkPolicy")]
    outside = [rule for policy in policies for egress in policy["spec"].get("egress", []) for rule in egress["to"]
               if "0.0.0.0/0" in str(rule)]  # fmt: skip
    own = _download()["NetworkPolicy"]["spec"]
    (cached,) = (each["spec"] for each in _overlay("model-cache")
                 if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "quire-download")  # fmt: skip

    assert outside == []
    assert own == cached
    assert own["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "download"}}
    assert own["egress"][0]["ports"] == [{"protocol": "TCP", "port": 443}]
    assert "169.254.0.0/16" in own["egress"][0]["to"][0]["ipBlock"]["except"]
