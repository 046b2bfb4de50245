"""deploy/kubernetes: its rendered manifests are valid, hardened, and allow exactly the links of a cell."""

import argparse
import json
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared import metric_names
from shared.config import FrontendConfig, SchedulerConfig, WorkerConfig, to_flags
from shared.config_sources import OTHER_VARIABLES, ConfigSources, all_settings
from shared.pulse import ENVIRONMENT
from tests.deploy.custom_resources import custom_objects
from tests.deploy.manifests import (
    CLAIMS,
    EXAMPLES,
    KUBERNETES,
    ROOT,
    SECRETS,
    TOOLS,
    Object,
    Pod,
    kustomized,
    matches,
    needs_tools,
    objects,
    of_kind,
    pods,
    rendered,
)
from tools.alerts import RULES
from tools.dashboards import BOARDS

pytestmark = needs_tools

VERSIONS = ("1.30", "1.34", "1.37")
"""Kubernetes versions: the oldest that deploy/kubernetes supports, a common one, and the newest."""
_CONFIGS: dict[str, Any] = {"frontend": FrontendConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}
_NOT_OURS = frozenset({"SCHEDULER_HOST", "COLLECTOR_HOST", "HOME", "TRITON_CACHE_DIR", "OTEL_EXPORTER_OTLP_ENDPOINT"})
_TORCHRUN = frozenset({"RANK"})
_LWS = frozenset({"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"})
"""Variables that the LeaderWorkerSet controller inserts before those in the manifest."""
_VALIDATE = """
import json, sys, kubernetes_validate as check
objects, versions = json.load(sys.stdin), sys.argv[1:]
for version in versions:
    for each in objects:
        try:
            check.validate(each, version, strict=True)
        except check.ValidationError as error:
            sys.exit(f"{version}: {each['kind']} {each['metadata']['name']}: {error.path} {error.message}")
"""

every_example = pytest.mark.parametrize("example", EXAMPLES)


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_in_three_versions_of_kubernetes(version: str) -> None:
    """No object of Kubernetes itself has an unknown field or a wrong type."""
    own = [each for example in EXAMPLES for each in objects(example) if each not in list(custom_objects(example))]

    assert validation_errors(own, version) == ""
    assert len(own) > 50


def test_a_wrong_field_is_noticed() -> None:
    """The validation above is strict."""
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"port": 1}}

    assert "'port' was unexpected" in validation_errors([wrong], VERSIONS[0])


def validation_errors(manifests: Sequence[Object], version: str) -> str:
    """Return the first field that a version of Kubernetes does not accept, or nothing."""
    command = [str(TOOLS / "python"), "-c", _VALIDATE, version]
    done = subprocess.run(command, input=json.dumps(manifests), capture_output=True, text=True, timeout=120)
    return done.stderr


@every_example
def test_names_lead_somewhere(example: str) -> None:
    """Each object that a pod names is rendered too, or is one that the operator makes."""
    there = {(each["kind"], each["metadata"]["name"]) for each in objects(example)}
    named = set()
    for pod in pods(example):
        named.add(("ServiceAccount", pod.spec["serviceAccountName"]))
        named |= {("Service", value) for name, value in pod.variables().items() if name.endswith("_HOST")
                  and not name.startswith("QUIRE_")}  # fmt: skip
        for volume in pod.spec["volumes"]:
            if "configMap" in volume:
                named.add(("ConfigMap", volume["configMap"]["name"]))
            if "secret" in volume:
                assert volume["secret"]["secretName"] in SECRETS
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in CLAIMS or ("PersistentVolumeClaim", claim) in there
        volumes = {volume["name"] for volume in pod.spec["volumes"]}
        mounted = {mount["name"] for mount in pod.container["volumeMounts"]}
        assert mounted <= volumes | {"state"}, pod.name
        assert volumes <= mounted, pod.name
    for scaled in of_kind(example, "ScaledObject"):
        named.add((scaled["spec"]["scaleTargetRef"]["kind"], scaled["spec"]["scaleTargetRef"]["name"]))
    for route in of_kind(example, "HTTPRoute") + of_kind(example, "GRPCRoute"):
        named |= {(ref["kind"], ref["name"]) for rule in route["spec"]["rules"] for ref in rule["backendRefs"]}
        named |= {("Gateway", ref["name"]) for ref in route["spec"]["parentRefs"]}

    assert named <= there


@every_example
def test_pods_have_no_rights(example: str) -> None:
    """No root, no capability, no write to the image, no token of the API server, no default system calls."""
    for pod in pods(example):
        security, container = pod.spec["securityContext"], pod.container["securityContext"]

        assert security["runAsNonRoot"]
        assert security["runAsUser"] >= 10000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not pod.spec["automountServiceAccountToken"]
        assert not pod.spec["enableServiceLinks"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.spec.keys()
        assert {"cpu", "memory", "ephemeral-storage"} <= pod.container["resources"]["requests"].keys()
        assert {"memory", "ephemeral-storage"} <= pod.container["resources"]["limits"].keys()
        assert all("sizeLimit" in volume["emptyDir"] for volume in pod.spec["volumes"] if "emptyDir" in volume)
        assert all(volume["secret"]["defaultMode"] == 0o440 for volume in pod.spec["volumes"] if "secret" in volume)


@every_example
def test_openshift_may_choose_the_users(example: str) -> None:
    """With the component, no pod sets a user or group; its other restrictions remain."""
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=ROOT / "build") as folder:
        (Path(folder) / "kustomization.yaml").write_text(
            f"resources: [../../deploy/kubernetes/examples/{example}]\n"
            "components: [../../deploy/kubernetes/components/openshift]\n"
        )
        found = list(yaml.safe_load_all(kustomized(Path(folder))))

    assert validation_errors([each for each in found if each["kind"] == "NetworkPolicy"], VERSIONS[0]) == ""
    for each in found:
        if each["kind"] in ("Deployment", "StatefulSet"):
            assert each["spec"]["template"]["spec"]["securityContext"] == {
                "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"},
            }, each["metadata"]["name"]  # fmt: skip


@every_example
def test_the_links_of_a_cell_and_no_others_are_allowed(example: str) -> None:
    """Front end and worker reach the scheduler of their own cell; a rank reaches its peers; all else is refused."""
    everyone = list(pods(example))
    routed = bool(of_kind(example, "InferencePool"))
    expected: set[tuple[Any, Any, int | None]] = set()
    for pod in everyone:
        mine = (pod.name, pod.cell)
        expected.add((mine, "dns", 53))
        peers = [other for other in everyone if other.cell == pod.cell]
        for other in peers:
            theirs = (other.name, other.cell)
            if (pod.role, other.role) == ("frontend", "scheduler"):
                expected.add((mine, theirs, 5701))
            if (pod.role, other.role) == ("worker", "scheduler"):
                expected.add((mine, theirs, 5702))
            if pod.role == other.role == "worker" and "RANK" in pod.variables():
                expected.add((mine, theirs, None))
        if pod.role == "frontend":
            outside = "quire/gateway" if routed else "quire/clients"
            expected |= {(outside, mine, 50051), (outside, mine, 8000), ("quire/metrics", mine, 8080)}
            expected |= {(outside, mine, 8080)} if routed else set()
        expected |= {(mine, (other.name, other.cell), 4317) for other in everyone
                     if other.role == "collector" and pod.role != "collector"}  # fmt: skip
    # Both policies select the collector's own pod, but it connects to no pod.
    found = {link for link in _links(example, everyone) if link[0] != link[1] or link[2] is None}

    assert found == expected


def _links(example: str, everyone: list[Pod]) -> set[tuple[Any, Any, int | None]]:
    """Return the connections that both ends permit as (from, to, port); port None means every port."""
    policies = [each["spec"] for each in of_kind(example, "NetworkPolicy")]
    for pod in everyone:
        for direction in ("Ingress", "Egress"):
            assert any(
                matches(policy["podSelector"], pod.labels) and direction in policy["policyTypes"] for policy in policies
            ), f"{pod.name} has no policy for {direction}: everything is allowed"
    out, into = set(), set()
    for policy in policies:
        for pod in (pod for pod in everyone if matches(policy["podSelector"], pod.labels)):
            for rule in policy.get("egress", []):
                out |= {((pod.name, pod.cell), end, port) for end, target in _ends(rule["to"], everyone)
                        for port in _ports(rule, target)}  # fmt: skip
            for rule in policy.get("ingress", []):
                into |= {(end, (pod.name, pod.cell), port) for end, _ in _ends(rule["from"], everyone)
                         for port in _ports(rule, pod)}  # fmt: skip
    outside = {link for link in out if link[1] == "dns"} | {link for link in into if isinstance(link[0], str)}
    return (out & into) | outside


def _ends(peers: list[Any], everyone: list[Pod]) -> list[tuple[Any, Pod | None]]:
    ends: list[tuple[Any, Pod | None]] = []
    for peer in peers:
        if "ipBlock" in peer:
            ends.append(("dns", None))
        elif "namespaceSelector" in peer:
            (expression,) = peer["namespaceSelector"]["matchExpressions"]
            ends.append(("dns" if "podSelector" in peer else expression["key"], None))
        else:
            ends += [((pod.name, pod.cell), pod) for pod in everyone if matches(peer["podSelector"], pod.labels)]
    return ends


def _ports(rule: Any, target: Pod | None) -> list[int | None]:
    if "ports" not in rule:
        return [None]
    ports = {each["port"] for each in rule["ports"]}
    return [port if isinstance(port, int) else target.ports().get(port) if target else None for port in ports]


@every_example
def test_a_pod_may_take_as_long_as_its_drain(example: str) -> None:
    """The kubelet's patience is longer than the pre-stop wait and the front end's grace period together."""
    for pod in pods(example):
        wait = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = float(pod.variables().get("QUIRE_GRACE_PERIOD_S", 0))

        assert pod.spec.get("terminationGracePeriodSeconds", 30) > wait + drain + 5
        assert pod.role != "frontend" or (wait > 0 and drain > 0)


@every_example
def test_probes_wait_for_the_load_and_need_no_secret(example: str) -> None:
    """Front ends respond on the plaintext port; scheduler and workers have no port and use a pulse file."""
    for pod in pods(example):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = pod.container[probe]
            match pod.role:
                case "frontend":
                    assert asked["httpGet"]["port"] == "health"
                    assert pod.variables()["QUIRE_HEALTH_PORT"] == str(pod.ports()["health"])
                case "scheduler" | "worker":
                    assert asked["exec"]["command"][:3] == ["python", "-m", "quire_server.probe"]
                    assert ENVIRONMENT in pod.variables()
                case _:
                    assert asked["tcpSocket"]["port"] == "otlp"
        startup = pod.container["startupProbe"]
        if pod.role == "worker":
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600, "large models load for long"


@every_example
def test_disruption_budgets_and_spreads_cover_the_pods(example: str) -> None:
    """Each part of the cell has one budget; a Deployment's pods are spread over nodes."""
    budgets = [each["spec"] for each in of_kind(example, "PodDisruptionBudget")]
    for pod in pods(example):
        covering = [each for each in budgets if matches(each["selector"], pod.labels)]
        if pod.role == "collector" or "RANK" in pod.variables():
            assert not covering
            continue
        assert len(covering) == 1, pod.name
        if pod.role != "scheduler":
            spread = {each["topologyKey"] for each in pod.spec["topologySpreadConstraints"]}
            assert "kubernetes.io/hostname" in spread
            assert all(matches(each["labelSelector"], pod.labels) for each in pod.spec["topologySpreadConstraints"])


@every_example
def test_variables_are_settings(example: str) -> None:
    """Each process accepts its environment and the settings file; no variable is misspelt or refers to nothing."""
    files = {each["metadata"]["name"]: each["data"] for each in of_kind(example, "ConfigMap")}
    for pod in pods(example):
        if pod.role == "collector":
            continue
        known = set(_LWS) if "RANK" in pod.variables() else set()
        for name, value in pod.variables().items():
            if name.startswith("QUIRE_") and name not in OTHER_VARIABLES | {ENVIRONMENT, "QUIRE_TENSOR_PARALLEL_SIZE"}:
                assert name.removeprefix("QUIRE_").lower() in all_settings()
            elif not name.startswith("QUIRE_"):
                assert name in _NOT_OURS | _TORCHRUN
            if isinstance(value, str):
                assert set(re.findall(r"\$\((\w+)\)", value)) <= known, name
            known.add(name)
        volume = next(each for each in pod.spec["volumes"] if each["name"] == "settings")
        assert "quire.toml" in files[volume["configMap"]["name"]]


@every_example
def test_an_operator_can_look_into_every_cell(example: str) -> None:
    """Front ends load principals from a Secret's folder, because a mounted file alone would not follow changes."""
    front_ends = [pod for pod in pods(example) if pod.role == "frontend"]

    assert front_ends
    for pod in front_ends:
        place = pod.variables()["QUIRE_PRINCIPALS"]
        (mount,) = (each for each in pod.container["volumeMounts"] if each["name"] == "principals")
        assert place == f"{mount['mountPath']}/principals.toml"
        assert "subPath" not in mount


@pytest.mark.parametrize("path", sorted(KUBERNETES.rglob("quire.toml")), ids=lambda path: path.parent.name)
def test_a_settings_file_is_accepted(path: Any) -> None:
    """Every process can start with it."""
    for config in _CONFIGS.values():
        sources = ConfigSources(argparse.Namespace(config=str(path)), {})
        assert to_flags(sources.make(config))


@every_example
def test_a_pool_has_the_front_ends_of_all_cells_as_endpoints(example: str) -> None:
    """A pool selects front ends only, by a port that they listen on, in the clear."""
    for pool in of_kind(example, "InferencePool"):
        selected = [pod for pod in pods(example) if matches(pool["spec"]["selector"], pod.labels)]

        assert {pod.role for pod in selected} == {"frontend"}
        assert {pod.cell for pod in selected} == {pod.cell for pod in pods(example)}
        for pod in selected:
            assert {each["number"] for each in pool["spec"]["targetPorts"]} <= set(pod.ports().values())
            assert "QUIRE_TLS_CERT" not in pod.variables()
            assert pod.variables()["QUIRE_INSECURE"] == "true"


def test_scalers_ask_for_metrics_of_their_own_cell() -> None:
    """The queries name metrics that exist, and each selector has the label of the cell."""
    known = {each.prometheus_name for each in metric_names.ALL} | {
        f"{each.prometheus_name}_total" for each in metric_names.ALL if each.kind is metric_names.Kind.COUNTER
    }
    for scaled in of_kind("eight-gpus", "ScaledObject"):
        cell = scaled["metadata"]["labels"]["app.kubernetes.io/instance"]
        for trigger in scaled["spec"]["triggers"]:
            if trigger["type"] != "prometheus":
                continue
            query = trigger["metadata"]["query"]
            selectors = re.findall(r"\{([^}]*)\}", query)
            names = set(re.findall(r"\b((?:quire|vllm)[_:]\w+)(?=\{)", query))
            if pattern := re.search(r'__name__=~"([^"]*)"', query):
                names |= {name for name in known if re.fullmatch(pattern[1], name)}

            assert names
            assert names <= known
            assert all(f'cell="{cell}"' in each for each in selectors)


def test_a_rollout_of_an_only_worker_pages_nobody() -> None:
    """While requests wait for a worker, as long as the examples with GPUs allow, the alert for no worker is pending."""
    (alert,) = (rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]
                if rule.get("alert") == "QuireNoWorker")  # fmt: skip
    waits = {
        tomllib.loads(path.read_text("utf-8"))["worker_wait_s"] for path in KUBERNETES.glob("examples/**/quire.toml")
    }

    assert waits == {60 * int(alert["for"].removesuffix("m"))}


def test_dashboards_and_rules_are_those_of_deploy() -> None:
    """They are generated, not copied: ConfigMap and rules object have the content of deploy/grafana and prometheus."""
    (dashboards,) = (each for each in of_kind("eight-gpus", "ConfigMap") if each["metadata"]["name"].endswith("boards"))
    (rules,) = of_kind("eight-gpus", "PrometheusRule")

    assert dashboards["data"] == {
        f"{board.name}.json": (ROOT / "deploy" / "grafana" / f"{board.name}.json").read_text("utf-8")
        for board in BOARDS
    }
    assert rules["spec"] == yaml.safe_load(RULES.read_text("utf-8"))


@pytest.mark.parametrize("image", ["scheduler", "worker"])
def test_dockerfiles_have_no_findings(image: str) -> None:
    """Hadolint accepts the Dockerfiles; each exception has its reason in the file."""
    done = subprocess.run(
        [str(TOOLS / "hadolint"), str(ROOT / "deploy" / f"Dockerfile.{image}")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout


_ARGUED = {
    "CKV_DOCKER_2": "one image has several roles, whose probes the manifests have; Kubernetes ignores HEALTHCHECK",
    "CKV_DOCKER_7": "the last stage of a worker is made from a stage of the same file, which has no tag",
    "CKV_K8S_11": "a limit of CPU throttles in the middle of a step; requests give each pod its share",
    "CKV_K8S_15": "tags are versions and never move; a pull that fails must not keep a worker from starting again",
    "CKV_K8S_43": "an image has its digest only in the registry of the operator, whose overlay sets it (`images:`)",
}


@pytest.mark.release
@every_example
def test_checkov_finds_nothing_that_is_not_argued(example: str, tmp_path: Any) -> None:
    """Findings of checkov are fixed, or argued above."""
    (tmp_path / "rendered.yaml").write_text(rendered(example))
    report = _checkov("kubernetes", str(tmp_path / "rendered.yaml"))

    assert report["summary"]["passed"] > 100
    assert {each["check_id"] for each in report["results"]["failed_checks"]} <= _ARGUED.keys()


@pytest.mark.release
@pytest.mark.parametrize("image", ["scheduler", "worker"])
def test_checkov_finds_nothing_in_the_dockerfiles(image: str) -> None:
    """Findings of checkov are fixed, or argued above."""
    report = _checkov("dockerfile", str(ROOT / "deploy" / f"Dockerfile.{image}"))

    assert report["summary"]["passed"] > 20
    assert {each["check_id"] for each in report["results"]["failed_checks"]} <= _ARGUED.keys()


def _checkov(framework: str, path: str) -> Any:
    checkov = ROOT / "build" / "checkov" / "bin" / "checkov"
    if not checkov.exists():
        pytest.skip("checkov is not installed; run make checkov")
    done = subprocess.run(
        [str(checkov), "--skip-download", "--framework", framework, "-f", path, "--compact", "-o", "json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    return json.loads(done.stdout)
