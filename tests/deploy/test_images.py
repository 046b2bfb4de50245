"""The images: their Dockerfiles build in an empty root, and the processes of the images serve a request.

There is no container engine here: `tests.deploy.images` runs the same commands. The packages of CUDA are gigabytes, so
the image for CUDA is built with the lock file of the image for CPUs.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from measure.testbed.service import free_ports
from quire import Client
from tests.deploy.images import STORE, Image, build
from tools.lock import TORCH

pytestmark = [
    pytest.mark.release,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("mmdebstrap"),
        reason="building needs root and mmdebstrap (apt-get install mmdebstrap)",
    ),
]

_MEGABYTE = 1_000_000
_COMPILES = """
import subprocess, sysconfig
include = sysconfig.get_paths()["include"]
source = "#include <Python.h>\\nint answer(void) { return 42; }\\n"
subprocess.run(["gcc", "-shared", "-fPIC", "-I", include, "-x", "c", "-", "-o", "/tmp/a.so"], input=source, text=True,
               check=True)
import ctypes
print(ctypes.CDLL("/tmp/a.so").answer())
"""


@pytest.fixture(scope="module")
def scheduler() -> Image:
    """The image of front ends and scheduler."""
    return build("scheduler")


@pytest.fixture(scope="module")
def worker() -> Image:
    """The image of workers on CPUs."""
    return _worker("cpu")


def _worker(device: str) -> Image:
    wheels = STORE / "wheels"
    if not list(wheels.glob("torch-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        done = subprocess.run([*command, f"torch==={TORCH}+cpu"], capture_output=True, text=True, timeout=1800)
        if done.returncode:
            pytest.skip(f"pip finds no torch for CPUs: {done.stderr}")
    arguments = {"DEVICE": device, "LOCK": "requirements-worker-cpu.txt", "TORCH_WHEELS": "/run/torch"}
    return build("worker", {"/run/torch": wheels}, **arguments)


@pytest.fixture
def cell(scheduler: Image, worker: Image, tmp_path: Path) -> Iterator[str]:
    """A scheduler, a front end and a worker, each from its image; yields the client address."""
    to_frontends, to_workers, grpc, http = free_ports(4)
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, scheduler.user, scheduler.user)
    commands = {
        "scheduler": scheduler.container(
            "scheduler", f"--frontend-address=tcp://127.0.0.1:{to_frontends}",
            f"--worker-address=tcp://127.0.0.1:{to_workers}", "--insecure", "--journal=/var/lib/quire/journal",
            "--record-dir=/var/lib/quire/record", mounts={"/var/lib/quire": state},
        ),
        "frontend": scheduler.container(
            "frontend", f"--frontend-address=tcp://127.0.0.1:{to_frontends}", "--insecure", "--model=demo",
            f"--grpc-port={grpc}", f"--http-port={http}",
        ),
        "worker": worker.container(f"--worker-address=tcp://127.0.0.1:{to_workers}", "--model=demo"),
    }  # fmt: skip
    with ExitStack() as open_files:
        processes = {}
        for name, command in commands.items():
            log = open_files.enter_context((tmp_path / f"{name}.log").open("wb"))
            processes[name] = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _await_ready(f"http://127.0.0.1:{http}/ready", list(processes.values()))
            yield f"127.0.0.1:{grpc}"
        finally:
            for process in reversed(processes.values()):
                process.terminate()
            codes = {name: process.wait(60) for name, process in processes.items()}
            for name in processes:
                print(f"--- {name}\n{(tmp_path / f'{name}.log').read_text()[-3000:]}", file=sys.stderr)
    assert set(codes.values()) == {0}, codes


def _await_ready(url: str, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Wait until a worker has joined."""
    end = time.monotonic() + 300
    while time.monotonic() < end and all(process.poll() is None for process in processes):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    pytest.fail("the front end is not ready")


def test_the_processes_of_the_images_serve_a_request(cell: str) -> None:
    """Users without rights, read-only roots: an answer, one by a grammar, and SIGTERM ends each process in order."""
    with Client(cell) as client:
        question = [{"role": "user", "content": "What is 3 plus 4?"}]
        answer = client.generate(messages=question, max_tokens=16, temperature=0.0, timeout=120).result()
        chosen = client.generate("Once", choice=["red", "green"], max_tokens=8, temperature=0.0, timeout=120).result()

        assert answer.text == "3 plus 4 is 7."
        assert chosen.text in ("red", "green")


def test_the_image_of_the_scheduler_is_small(scheduler: Image) -> None:
    """A node downloads at most 90 MB, with the base; unpacked it is at most 250 MB."""
    print(f"quire-scheduler: {scheduler.size / _MEGABYTE:.0f} MB, {scheduler.pulled / _MEGABYTE:.0f} MB to download")

    assert scheduler.pulled <= 90 * _MEGABYTE
    assert scheduler.size <= 250 * _MEGABYTE


def test_the_image_of_cpu_workers_has_no_compiler(worker: Image) -> None:
    """The kernels were compiled when the image was built."""
    print(f"quire-worker-cpu: {worker.size / _MEGABYTE:.0f} MB")
    code = (
        "import glob, shutil, quire_server; print(len(glob.glob(quire_server.__path__[0] + "
        "'/_packages/kernels/native/_native*.so')), shutil.which('gcc'), shutil.which('pip'))"
    )

    assert _printed(worker, code).split() == ["1", "None", "None"]


def test_the_image_for_cuda_compiles_what_triton_does() -> None:
    """Triton builds extensions of Python in C when a kernel is first used."""
    image = _worker("cuda")

    assert _printed(image, _COMPILES).strip() == "42"
    assert image.entry_point == ("quire", "worker")


@pytest.mark.parametrize("name", ["scheduler", "worker"])
def test_an_image_has_its_bill_of_materials_and_no_sources(name: str, request: pytest.FixtureRequest) -> None:
    """The bill is at the path in deploy/README.md; the image does not contain the source tree."""
    code = (
        "import json, os; bill = json.load(open('/usr/share/quire/sbom.cdx.json')); "
        "print(bill['metadata']['component']['name'], os.path.exists('/src'), os.getuid(), os.access('/opt', os.W_OK))"
    )
    expected = {"scheduler": "quire-scheduler", "worker": "quire-worker-cpu"}[name]

    assert _printed(request.getfixturevalue(name), code).split() == [expected, "False", "10001", "False"]


def _printed(image: Image, code: str) -> str:
    command = image.container("-c", code, entry_point=["python"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
