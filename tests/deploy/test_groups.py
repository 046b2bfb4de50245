"""Workers with several GPUs: the manifests' pods request their GPUs, and a group across machines starts."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.testbed.service import QUIRE, free_ports, until
from quire import Client
from tests.deploy.manifests import ROOT, Pod, needs_tools, of_kind, pods

pytestmark = needs_tools

_GPUS = "nvidia.com/gpu"
_PROMPT, _TOKENS = "Once upon a time", 24


def _worker(example: str) -> Pod:
    (pod,) = (pod for pod in pods(example) if pod.role == "worker")
    return pod


def test_a_worker_of_one_machine_has_all_its_gpus_in_one_pod() -> None:
    """The ranks are processes in one pod and share memory; the pod requests one GPU per rank."""
    pod = _worker("tensor-parallel")
    size = pod.variables()["QUIRE_TENSOR_PARALLEL_SIZE"]
    resources = pod.container["resources"]

    assert int(size) > 1
    assert resources["requests"][_GPUS] == resources["limits"][_GPUS] == size
    assert "command" not in pod.container, "the worker starts its ranks"
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod.container["volumeMounts"]


def test_a_group_over_machines_has_a_rank_for_each_gpu() -> None:
    """The ranks of all pods are as many as the setting says, and groups need no spare machine for a rollout."""
    (group,) = of_kind("several-machines", "LeaderWorkerSet")
    pod = _worker("several-machines")
    (per_pod,) = (each.partition("=")[2] for each in pod.container["command"] if "--nproc-per-node" in each)
    machines = group["spec"]["leaderWorkerTemplate"]["size"]

    assert pod.container["resources"]["limits"][_GPUS] == per_pod
    assert int(pod.variables()["QUIRE_TENSOR_PARALLEL_SIZE"]) == machines * int(per_pod)
    assert group["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}


@pytest.mark.parametrize("example", ["tensor-parallel", "several-machines"])
def test_requests_wait_while_an_only_worker_is_replaced(example: str) -> None:
    """The old worker leaves first, so requests wait for longer than by default."""
    settings = next(
        each["data"]["quire.toml"] for each in of_kind(example, "ConfigMap") if "quire.toml" in each["data"]
    )

    assert "worker_wait_s = 600" in settings
    for each in of_kind(example, "Deployment"):
        if each["metadata"]["name"] == "quire-worker":
            assert each["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


@pytest.mark.release
def test_the_command_of_a_group_computes_the_tokens_of_one_process(tmp_path: Path) -> None:
    """Two pods, here with one CPU rank each, serve as one worker, and leave in order."""
    with _service(tmp_path) as (client, worker_address):
        with _running(_single(worker_address), tmp_path / "single"):
            expected = _generated(client)
        (master,) = free_ports(1)
        with contextlib.ExitStack() as ended:
            for number in (0, 1):
                command, environment = _pod(number, master, worker_address)
                ended.enter_context(_running(command, tmp_path / f"pod-{number}", environment, is_group=True))
            found = _generated(client)

    assert found == expected
    assert len(found) == _TOKENS


def _pod(number: int, master: int, address: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and variables of a pod in the group, as its container gets them."""
    pod = _worker("several-machines")
    given = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(number), "LWS_LEADER_ADDRESS": "127.0.0.1"}
    changes = {"--nproc-per-node=8": "--nproc-per-node=1", "--master-port=29500": f"--master-port={master}"}
    command = [changes.get(each, each) for each in pod.container["command"]]
    assert set(changes.values()) < set(command)
    filled = [re.sub(r"\$\((\w+)\)", lambda match: given[match[1]], each) for each in command]
    variables = {name: value for name, value in pod.variables().items() if name == "RANK"}
    mine = {name: re.sub(r"\$\((\w+)\)", lambda match: given[match[1]], value) for name, value in variables.items()}
    settings = {
        "QUIRE_TENSOR_PARALLEL_SIZE": "2", "QUIRE_DEVICE": "cpu", "QUIRE_WORKER_ADDRESS": address,
        "QUIRE_MODEL": "demo", "QUIRE_KV_CACHE_MEMORY": "64MiB", "QUIRE_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "QUIRE_WORKER_ID": f"quire-group-0-{number}",
    }  # fmt: skip
    assert filled[0] == "python"
    return [sys.executable, *filled[1:]], mine | settings


def _single(address: str) -> list[str]:
    return [*QUIRE, "worker", f"--worker-address={address}", "--model=demo", "--device=cpu", "--kv-cache-memory=64MiB"]


@contextlib.contextmanager
def _running(
    command: list[str], log: Path, variables: dict[str, str] | None = None, *, is_group: bool = False
) -> Iterator[None]:
    """Run a process, and end it as the kubelet does. torchrun's exit code is not 0 after a signal."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, env=os.environ | (variables or {}) | {"PYTHONPATH": str(ROOT)}
        )
        try:
            yield
            process.terminate()
            code = process.wait(60)
            assert code == 0 or is_group, f"{shlex.join(command)}: {code}\n{log.read_text()[-3000:]}"
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _service(folder: Path) -> Iterator[tuple[Client, str]]:
    grpc_port, http_port = free_ports(2)
    links = [f"--frontend-address=ipc://{folder}/f", f"--worker-address=ipc://{folder}/w"]
    scheduler = [*QUIRE, "scheduler", *links, "--record-dir=off", "--worker-wait-s=300"]
    front_end = [*QUIRE, "frontend", links[0], f"--grpc-port={grpc_port}", f"--http-port={http_port}"]
    with (
        _running(scheduler, folder / "scheduler.log"),
        _running(front_end, folder / "frontend.log"),
        Client(f"127.0.0.1:{grpc_port}") as client,
    ):
        yield client, f"ipc://{folder}/w"


def _generated(client: Client) -> list[int]:
    """Return the tokens of an answer, once there is a worker."""
    found: list[Any] = []

    def answered() -> bool:
        with contextlib.suppress(Exception):
            found[:] = client.generate(_PROMPT, max_tokens=_TOKENS, temperature=0.0, ignore_eos=True).result().token_ids
        return bool(found)

    until(answered, "the group answers", patience_s=600)
    return found
