"""What is installed: the client alone for other services, and a server that hides no package of theirs."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tools.dist import ROOT, build, stage_client, stage_server

_SHADOWS = ("services", "kernels", "shared", "protos")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class Environment:
    """A virtual environment with wheels, the dependencies of this one, and an application's own packages."""

    def __init__(self, folder: Path, wheels: list[Path]) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        install = [sys.executable, "-m", "pip", f"--python={self.python}", "install", "--quiet", "--no-index"]
        subprocess.run([*install, "--no-deps", "--disable-pip-version-check", *map(str, wheels)], check=True)
        self.site = next((folder / "lib").glob("python*/site-packages"))
        # Only the dependencies: a .pth file of that folder, such as that of an editable install, is not followed.
        (self.site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        for name in _SHADOWS:
            (self.site / name).mkdir()
            (self.site / name / "__init__.py").write_text("OWNER = 'the application'\n")

    def run(self, *arguments: str) -> str:
        """Run the interpreter outside the source tree; return what it prints."""
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.site.parent,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The client's and the server's wheel; without the native kernels, whose compilation takes minutes."""
    folder = tmp_path_factory.mktemp("wheels")
    client, server = stage_client(ROOT, folder), stage_server(ROOT, folder)
    (server / "setup.py").unlink()
    for each in (client, server):
        build(each, folder, isolated=False)
    return next(folder.glob("quire_client-*.whl")), next(folder.glob("quire_server-*.whl"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheels: tuple[Path, Path]) -> Environment:
    """Both wheels, installed beside an application."""
    return Environment(tmp_path_factory.mktemp("both"), list(wheels))


def test_the_client_is_one_small_package(wheels: tuple[Path, Path]) -> None:
    """The client's wheel brings one import name, under 2 MB, and no dependency of the server."""
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = {name.split("/")[0] for name in wheel.namelist()}
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()

    assert {name for name in names if not name.endswith(".dist-info")} == {"quire"}
    assert wheels[0].stat().st_size < 2_000_000
    needs = sorted(line.split()[1].split(">")[0] for line in metadata.splitlines() if line.startswith("Requires-Dist"))
    assert needs == ["googleapis-common-protos", "grpcio", "grpcio-status", "opentelemetry-api", "protobuf"]


def test_the_client_imports_nothing_else(tmp_path: Path, wheels: tuple[Path, Path]) -> None:
    """With the client alone, `quire` works, names what it has, and imports no numpy and no package of the server."""
    client = Environment(tmp_path, [wheels[0]])
    code = "import sys, quire; from quire import AsyncClient, Client; Client('127.0.0.1:1').close();"
    code += "print(*sorted({name.split('.')[0] for name in sys.modules})); print(*dir(quire))"
    modules, public = (set(line.split()) for line in client.run("-c", code).splitlines())

    assert modules.isdisjoint({"numpy", "torch", "quire_server", "services", "shared", "pydantic"})
    assert {"Client", "AsyncClient", "errors"} <= public


def test_an_installed_client_is_typed(tmp_path: Path, wheels: tuple[Path, Path]) -> None:
    """The client's types are found by mypy without settings."""
    client = Environment(tmp_path / "venv", [wheels[0]])
    program = tmp_path / "program.py"
    program.write_text("from quire import Client\nreveal_type(Client('a:1').generate('x'))\nClient(1)\n")
    mypy = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={client.python}", str(program)]
    said = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False).stdout

    assert 'Revealed type is "quire.client.Generation"' in said
    assert 'incompatible type "int"' in said
    assert "Found 1 error" in said


def test_the_server_hides_no_package_of_an_application(installed: Environment) -> None:
    """An application beside the server imports its own packages, and the server imports its own."""
    owners = ", ".join(f"{name}.OWNER" for name in _SHADOWS)
    shown = installed.run("-c", f"import {', '.join(_SHADOWS)}; print({owners})")

    assert shown.count("the application") == len(_SHADOWS)
    code = "import sys; sys.argv = ['quire', '--version']; from quire_server.entry import main; main();"
    code += "import services; print(services.__file__)"
    version, services = installed.run("-c", code).splitlines()
    assert version.startswith("quire 0.")
    assert "_packages" in services


def test_the_installed_server_serves(installed: Environment) -> None:
    """All processes of an installed server start beside packages of the same names, and the client gets an answer."""
    flags = ("serve", "--model=demo", "--grpc-port=0", "--http-port=0")
    serve = [str(installed.python), "-m", "quire_server.entry", *flags]
    with subprocess.Popen(
        serve, cwd=installed.site.parent, env=_environment(), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            ready = next((line for line in server.stdout if line.startswith("ready grpc=")), "")
            target = ready.split()[1].removeprefix("grpc=")
            code = f"import quire; print(quire.Client('{target}').generate('2 + 2 =', max_tokens=4).result().text)"
            assert installed.run("-c", code).strip()
        finally:
            server.terminate()
            assert server.wait(60) == 0


def test_developers_tools_are_left_out(wheels: tuple[Path, Path]) -> None:
    """Neither simulator nor benchmarks of parts are in the server's wheel; the one of a running service is."""
    with zipfile.ZipFile(wheels[1]) as wheel:
        names = wheel.namelist()

    developers = ("/sim/", "_svc/bench/", "services/bench/", "bench_kernels", "bench_scheduler", "bench/offline")
    assert not [name for name in names for part in developers if part in name]
    assert {"quire_server/cli/bench_serve.py", "quire_server/bench/run.py"} <= set(names)
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"quire_server"}
