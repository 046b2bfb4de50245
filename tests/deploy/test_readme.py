"""deploy/kubernetes/README.md and the manifests agree: images, requests, names, pickers, the claim."""

import importlib
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_server.cli._parser import OneLineParser
from quire_server.cli.keys import add_principal
from quire_server.cli.main import COMMANDS
from services.access.principals import Principal, Principals
from shared.errors import UnauthenticatedError
from tests.deploy.manifests import EXAMPLES, KUBERNETES, ROOT, TOOLS, kustomized, matches, needs_tools, of_kind, pods
from tests.deploy.test_manifests import validation_errors

pytestmark = needs_tools

README = (KUBERNETES / "README.md").read_text("utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
every_example = pytest.mark.parametrize("example", EXAMPLES)


@every_example
def test_the_images_have_the_tags_that_the_page_builds(example: str) -> None:
    """An image that is built as the page says is found without an overlay."""
    built = set(re.findall(r"(?m)^ *docker build .* -t (\S+)", README))
    used = {pod.container["image"] for pod in pods(example) if pod.role != "collector"}

    assert len(built) == 3
    assert used <= built


def test_the_page_has_the_sum_of_the_requests_of_the_cpu_cell() -> None:
    """A reader knows before the first apply whether the cell fits on a laptop."""
    cpus, mebibytes = 0.0, 0.0
    counts = {each["metadata"]["name"]: each["spec"]["replicas"]
              for kind in ("Deployment", "StatefulSet") for each in of_kind("one-cell-cpu", kind)}  # fmt: skip
    for pod in pods("one-cell-cpu"):
        requests = pod.container["resources"]["requests"]
        number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", requests["memory"]).groups()  # type: ignore[union-attr]
        cpus += counts[pod.name] * float(requests["cpu"])
        mebibytes += counts[pod.name] * int(number) * (1024 if unit == "Gi" else 1)

    assert f"{cpus:g} CPUs and {mebibytes / 1024:g} GiB" in README


def test_the_certificates_have_the_names_of_the_front_ends() -> None:
    """Certificates are valid for the names used in the namespace, in other namespaces and behind a port-forward."""
    wanted = {"quire-frontend", "quire-frontend.quire.svc", "localhost"}
    by_hand = set(re.findall(r"DNS:([\w.-]+)", README))

    assert wanted <= by_hand
    for example in EXAMPLES:
        for certificate in of_kind(example, "Certificate"):
            assert wanted <= set(certificate["spec"]["dnsNames"])


def test_grpc_and_http_share_no_host_name_of_a_listener() -> None:
    """The Gateway API permits one kind of route per host name on a listener; each listener has a certificate."""
    (gateway,) = of_kind("eight-gpus", "Gateway")
    listeners = {each["name"]: each for each in gateway["spec"]["listeners"]}
    taken: dict[tuple[str, str], str] = {}
    for kind in ("GRPCRoute", "HTTPRoute"):
        for route in of_kind("eight-gpus", kind):
            for name in route["spec"]["hostnames"]:
                (parent,) = route["spec"]["parentRefs"]
                assert listeners[parent["sectionName"]]["hostname"] == name
                assert taken.setdefault((parent["sectionName"], name), kind) == kind

    assert len(taken) == len(listeners) == 2
    assert all(each["tls"]["certificateRefs"] for each in listeners.values())


@every_example
def test_keda_alone_decides_the_number_of_what_it_scales(example: str) -> None:
    """`kubectl apply` of a manifest with `replicas` would undo the autoscaler's decision."""
    scaled = {each["spec"]["scaleTargetRef"]["name"] for each in of_kind(example, "ScaledObject")}
    for deployment in of_kind(example, "Deployment"):
        assert ("replicas" in deployment["spec"]) != (deployment["metadata"]["name"] in scaled)


def test_the_principals_of_the_page_have_an_operator_and_admit_other_callers(tmp_path: Path) -> None:
    """Step 2 makes this file: with `[anonymous]` as the page appends it, and without it where the Gateway is public."""
    path = tmp_path / "principals.toml"
    operator = add_principal(path, "operator", is_admin=True)
    with pytest.raises(UnauthenticatedError):
        Principals(str(path), anonymous_is_admin=False).identify("")
    (added,) = re.findall(r"printf '(.*)' >> principals.toml", README)
    # Copying the whole block for `eight-gpus` must not open the public Gateway.
    (block,) = (each for each in _shell_blocks() if ">> principals.toml" in each)
    assert len(block.strip().splitlines()) == 1
    path.write_text(path.read_text("utf-8") + added.replace("\\n", "\n"), "utf-8")
    principals = Principals(str(path), anonymous_is_admin=False)

    assert principals.identify(f"Bearer {operator}").is_admin
    assert principals.identify("") == Principal("anonymous")


def test_the_compose_file_admits_everybody_and_an_operator_can_be_added(tmp_path: Path) -> None:
    """The file next to compose.yaml is the one that its front end reads, in a mounted folder."""
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text("utf-8"))
    front_end = compose["services"]["frontend"]
    (inside,) = (each.partition("=")[2] for each in front_end["command"] if each.startswith("--principals="))
    path = shutil.copy(ROOT / "deploy" / "principals" / "principals.toml", tmp_path)
    operator = add_principal(Path(path), "operator", is_admin=True)
    principals = Principals(str(path), anonymous_is_admin=False)

    assert f"./principals:{Path(inside).parent}:ro" in front_end["volumes"]
    assert principals.identify(f"Bearer {operator}").is_admin
    assert principals.identify("") == Principal("anonymous")


def test_a_rollout_on_one_gpu_node_needs_no_spare_gpu() -> None:
    """An old worker leaves before a new one starts, and requests wait longer than by default."""
    (worker,) = (each for each in of_kind("one-gpu-node", "Deployment") if each["metadata"]["name"] == "quire-worker")
    settings = tomllib.loads((KUBERNETES / "examples" / "one-gpu-node" / "quire.toml").read_text("utf-8"))

    assert worker["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    assert settings["worker_wait_s"] > 60


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("examples/**/quire.toml")), ids=lambda path: path.parent.name)
def test_a_settings_file_repeats_the_settings_of_the_base(path: Any) -> None:
    """The example's file replaces the base's, so it must contain every setting of the base."""
    base = tomllib.loads((KUBERNETES / "base" / "quire.toml").read_text("utf-8"))

    assert base.keys() <= tomllib.loads(path.read_text("utf-8")).keys()


def test_the_pickers_of_the_page_are_those_of_the_pools() -> None:
    """The chart's releases get the Services that the pools name, and select the pools' endpoints."""
    values = yaml.safe_load((KUBERNETES / "components" / "inference-pool" / "picker-values.yaml").read_text("utf-8"))
    router = values["router"]
    releases = set(re.findall(r"^helm -n quire install (\S+)", README, re.MULTILINE))
    pools = {each["spec"]["endpointPickerRef"]["name"]: each["spec"] for each in of_kind("eight-gpus", "InferencePool")}

    assert pools.keys() == {f"{release}-epp" for release in releases}
    assert pools["quire-epp"]["targetPorts"] == router["modelServers"]["targetPorts"]
    for pool in pools.values():
        assert pool["selector"]["matchLabels"] == router["modelServers"]["matchLabels"]
    for pod in pods("eight-gpus"):
        if matches({"matchLabels": router["modelServers"]["matchLabels"]}, pod.labels):
            assert router["epp"]["flags"]["model-server-metrics-port"] == pod.ports()["health"]


def test_commands_of_the_pages_name_no_group_of_pods_to_delete() -> None:
    """Each drill deletes one pod, never a label, which would select all pods."""
    commands = re.findall(r"^kubectl .*delete pod.*$", OPERATIONS, re.MULTILINE)

    assert len(commands) == 6
    assert not [each for each in commands if " -l" in each or "--all" in each or "--selector" in each]


def _shell_blocks() -> list[str]:
    return [block for page in (README, OPERATIONS) for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)]


def test_the_overlay_of_the_page_renders() -> None:
    """The copied overlay renders the workers, images and volumes that it names."""
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (overlay,) = (block for block in blocks if "Kustomization" in block and "images:" in block)
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=ROOT / "build") as folder:
        (Path(folder) / "kustomization.yaml").write_text(overlay.replace("../deploy", "../../deploy"))
        command = [str(TOOLS / "kubectl"), "kustomize", folder]
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    specs = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(found)
             if each["kind"] in ("Deployment", "StatefulSet")}  # fmt: skip

    assert specs["quire-worker"]["replicas"] == 4
    assert found.count("registry.example.org/quire-worker:") == 1
    assert found.count("registry.example.org/quire-scheduler:") == 2


def test_the_overlay_of_a_second_cell_renders() -> None:
    """The second cell has its own certificate and metrics label; the rules for all cells stay in the first cell."""
    (change,) = (block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "$patch: delete" in block)
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=ROOT / "build") as folder:
        example = "../../deploy/kubernetes/examples/one-gpu-node"
        text = f"namespace: quire-small\nresources: [{example}]\n{change}"
        (Path(folder) / "kustomization.yaml").write_text(text)
        (Path(folder) / "quire.toml").write_text('model = "/models/small"\n')
        found = list(yaml.safe_load_all(kustomized(Path(folder))))
    (certificate,) = (each for each in found if each["kind"] == "Certificate")
    (settings,) = (each for each in found if each["metadata"]["name"].startswith("quire-settings"))
    (service,) = (each for each in found if each["kind"] == "Service" and each["metadata"]["name"] == "quire-frontend")

    assert "quire-frontend.quire-small.svc" in certificate["spec"]["dnsNames"]
    assert settings["data"] == {"quire.toml": 'model = "/models/small"\n'}
    assert service["metadata"]["labels"]["app.kubernetes.io/instance"] == "small"
    assert {each["metadata"]["namespace"] for each in found} == {"quire-small"}
    assert not [each for each in found if each["kind"] == "PrometheusRule" or "dashboards" in each["metadata"]["name"]]


def test_the_thresholds_on_the_page_render() -> None:
    """They change the trigger `requests` and the worker limits of both cells, and nothing for the front ends."""
    (change,) = (block for block in re.findall(r"```yaml\n(.*?)```", OPERATIONS, re.DOTALL) if "ScaledObject" in block)
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=ROOT / "build") as folder:
        text = f"resources: [../../deploy/kubernetes/examples/eight-gpus]\n{change}"
        (Path(folder) / "kustomization.yaml").write_text(text)
        found = [each for each in yaml.safe_load_all(kustomized(Path(folder))) if each["kind"] == "ScaledObject"]
    changed = {each["metadata"]["name"]: each["spec"] for each in found if each["spec"]["maxReplicaCount"] == 3}

    assert changed.keys() == {"a-quire-worker", "b-quire-worker"}
    for spec in changed.values():
        assert spec["minReplicaCount"] == 2
        thresholds = {each["name"]: each["metadata"]["threshold"] for each in spec["triggers"]}
        assert thresholds == {"requests": "0.6", "kv": "0.85", "goodput": "1"}


@pytest.mark.parametrize(("example", "schedulers"), [("one-gpu-node", 1), ("eight-gpus", 2)])
def test_the_journal_of_a_rollback_renders(example: str, schedulers: int) -> None:
    """The overlay gives every scheduler the folder from the command instead of the previous one."""
    (change,) = (block for block in re.findall(r"```yaml\n(.*?)```", OPERATIONS, re.DOTALL) if "QUIRE_JOURNAL" in block)
    (folder_set,) = re.findall(r"kubectl .* set env .* QUIRE_JOURNAL=(\S+)", OPERATIONS)
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=ROOT / "build") as folder:
        text = f"resources: [../../deploy/kubernetes/examples/{example}]\n{change}"
        (Path(folder) / "kustomization.yaml").write_text(text)
        found = [each for each in yaml.safe_load_all(kustomized(Path(folder))) if each["kind"] == "StatefulSet"]
    containers = [each["spec"]["template"]["spec"]["containers"][0] for each in found]
    journals = [item["value"] for each in containers for item in each["env"] if item["name"] == "QUIRE_JOURNAL"]

    assert journals == [folder_set] * schedulers


def test_the_change_for_workers_of_four_gpus_renders() -> None:
    """The change sets the numbers of ranks and GPUs together, and leaves the rest of the container unchanged."""
    (change,) = (block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if 'value: "4"' in block)
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=ROOT / "build") as folder:
        text = f"resources: [../../deploy/kubernetes/examples/tensor-parallel]\n{change}"
        (Path(folder) / "kustomization.yaml").write_text(text)
        command = [str(TOOLS / "kubectl"), "kustomize", folder]
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    (worker,) = (each for each in yaml.safe_load_all(found)
                 if each["kind"] == "Deployment" and each["metadata"]["name"] == "quire-worker")  # fmt: skip
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    (before,) = (pod for pod in pods("tensor-parallel") if pod.role == "worker")
    size = {each["name"]: each.get("value") for each in container["env"]}["QUIRE_TENSOR_PARALLEL_SIZE"]

    assert container["resources"]["requests"]["nvidia.com/gpu"] == size == "4"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == size
    assert len(container["env"]) == len(before.container["env"])


def test_the_choice_of_nodes_on_the_page_renders() -> None:
    """It changes the workers of both cells, as the page says."""
    (change,) = (block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "gpu.product" in block)
    change = change.replace("name: quire-worker", "name: .*-quire-worker")
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=ROOT / "build") as folder:
        text = f"resources: [../../deploy/kubernetes/examples/eight-gpus]\n{change}"
        (Path(folder) / "kustomization.yaml").write_text(text)
        found = [each for each in yaml.safe_load_all(kustomized(Path(folder))) if each["kind"] == "Deployment"]
    chosen = {each["metadata"]["name"] for each in found if "nodeSelector" in each["spec"]["template"]["spec"]}

    assert chosen == {"a-quire-worker", "b-quire-worker"}
    assert validation_errors(found, "1.30") == ""


def test_the_commands_of_quire_on_the_pages_exist() -> None:
    """The command line accepts every call of `quire` in a shell block."""
    calls = re.findall(r"^ *(?:\.venv/bin/)?quire (.*)$", "".join(_shell_blocks()).replace("\\\n", " "), re.MULTILINE)

    assert len(calls) >= 6
    for call in calls:
        words = shlex.split(call, comments=True)
        command = next(each for each in COMMANDS if words[: len(each.name.split())] == each.name.split())
        parser = OneLineParser(command.name, description="", examples="")
        importlib.import_module(command.module).configure(parser)
        parser.parse(words[len(command.name.split()) :])  # An unknown flag ends the test with SystemExit.


def test_shell_blocks_of_the_pages_parse() -> None:
    """Bash reads every block."""
    blocks = _shell_blocks()

    assert len(blocks) > 10
    for block in blocks:
        done = subprocess.run(["bash", "-n"], input=re.sub(r"(?m)^ {2,5}", "", block), capture_output=True, text=True)
        assert done.stderr == "", block
