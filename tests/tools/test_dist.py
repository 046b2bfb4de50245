"""What is installed: the client alone for other services, and a server that hides no package of theirs."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.house.test_imports import imports
from tools.dist import PRIVATE, ROOT, build, client_name, read_project, stage_client, stage_server

_SHADOWS = ("services", "kernels", "shared", "protos")
_OURS = ("quire", "__editable__", "_quire")
"""How the names of what an editable install leaves in an environment begin."""


def _environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


class Environment:
    """A virtual environment with the wheels, this one's third-party packages, and an application's own packages."""

    def __init__(self, folder: Path, wheels: list[str]) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        self.site = next((folder / "lib").glob("python*/site-packages"))
        third_party = folder / "third-party"
        third_party.mkdir()
        for found in Path(sysconfig.get_path("purelib")).iterdir():
            if not found.name.lower().startswith(_OURS) and found.suffix != ".pth":
                (third_party / found.name).symlink_to(found)
        (self.site / "third-party.pth").write_text(f"{third_party}\n")
        # pip resolves every requirement without an index, so a missing package is an error.
        install = [sys.executable, "-m", "pip", f"--python={self.python}", "install", "--quiet", "--no-index"]
        subprocess.run([*install, "--disable-pip-version-check", *wheels], check=True)
        for name in _SHADOWS:
            (self.site / name).mkdir()
            (self.site / name / "__init__.py").write_text("OWNER = 'the application'\n")

    def run(self, *arguments: str, **variables: str) -> str:
        """Run the interpreter outside the source tree with these environment variables; return its output."""
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.site.parent,
            env=_environment(**variables),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The client's and the server's wheel, without the native kernels, whose compilation takes minutes."""
    folder = tmp_path_factory.mktemp("wheels")
    client, server = stage_client(ROOT, folder), stage_server(ROOT, folder)
    (server / "setup.py").unlink()
    for each in (client, server):
        build(each, folder, isolated=False)
    names = (client_name(ROOT), read_project(ROOT)["name"])
    client_wheel, server_wheel = (next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in names)
    return client_wheel, server_wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheels: tuple[Path, Path]) -> Environment:
    """Both wheels and the extra for workers, installed beside an application."""
    return Environment(tmp_path_factory.mktemp("both"), [str(wheels[0]), f"{wheels[1]}[worker]"])


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def _files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheels_require_nothing_of_ours(wheels: tuple[Path, Path]) -> None:
    """Nobody else can claim a distribution that the wheels would install: both require third-party packages only."""
    required = [need for wheel in wheels for need in _metadata(wheel).get_all("Requires-Dist", [])]

    assert len(required) > 20
    assert [need for need in required if "quire" in need] == []


def test_the_wheels_share_no_file(wheels: tuple[Path, Path]) -> None:
    """Neither wheel overwrites or removes the other's files; both state one version."""
    client, server = map(_files, wheels)

    assert client & server == set()
    assert {_metadata(wheel)["Version"] for wheel in wheels} == {read_project(ROOT)["version"]}


def test_a_package_quire_of_somebody_else_does_not_disturb_the_server(installed: Environment, tmp_path: Path) -> None:
    """The server imports its own copy of the client, even if a package of the same name comes first on the path."""
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    code = "import sys; sys.argv = ['quire', '--version']; from quire_server.entry import main; main();"
    code += "import quire; print(quire.__file__)"
    version, path = installed.run("-c", code, PYTHONPATH=str(tmp_path)).splitlines()

    assert version == f"quire {read_project(ROOT)['version']}"
    assert path.startswith(str(installed.site / "quire_server" / "_packages"))
    assert installed.run("-c", "import quire; print(quire.__file__)").startswith(str(installed.site / "quire"))


def test_the_client_is_one_small_package(wheels: tuple[Path, Path]) -> None:
    """The client's wheel brings one import name, under 2 MB, and no dependency of the server."""
    names = {name.split("/")[0] for name in _files(wheels[0])}

    assert {name for name in names if not name.endswith(".dist-info")} == {"quire"}
    assert wheels[0].stat().st_size < 2_000_000
    needs = sorted(need.split(">")[0] for need in _metadata(wheels[0]).get_all("Requires-Dist", []))
    assert needs == ["googleapis-common-protos", "grpcio", "grpcio-status", "opentelemetry-api", "protobuf"]


def test_the_client_imports_nothing_else(tmp_path: Path, wheels: tuple[Path, Path]) -> None:
    """With the client alone, `quire` works, names what it has, and imports no numpy and no package of the server."""
    client = Environment(tmp_path, [str(wheels[0])])
    code = "import sys, quire; from quire import AsyncClient, Client; Client('127.0.0.1:1').close();"
    code += "print(*sorted({name.split('.')[0] for name in sys.modules})); print(*dir(quire))"
    modules, public = (set(line.split()) for line in client.run("-c", code).splitlines())

    assert modules.isdisjoint({"numpy", "torch", "quire_server", "services", "shared", "pydantic"})
    assert {"Client", "AsyncClient", "errors"} <= public


@pytest.mark.every(3)
def test_an_installed_client_is_typed(tmp_path: Path, wheels: tuple[Path, Path]) -> None:
    """The client's types are found by mypy without settings."""
    client = Environment(tmp_path / "venv", [str(wheels[0])])
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
    """An installed server's processes start next to packages with the same names, and the client gets a response."""
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
    """The server's wheel has neither the simulator nor benchmarks of parts, but has load generation."""
    names = _files(wheels[1])

    developers = ("checks/", "measure/kernels", "measure/scheduler", "measure/results", "bench_kernels", "offline")
    assert not [name for name in names for part in developers if part in name]
    needed = ("measure/commands/bench_serve.py", "measure/load/run.py", "records/rules/replayed.py")
    assert {f"quire_server/_packages/{name}" for name in needed} <= names
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"quire_server"}


def _modules(wheel: Path) -> dict[str, str]:
    """Return every module's text in the server's wheel, by import name."""
    with zipfile.ZipFile(wheel) as archive:
        paths = [name for name in archive.namelist() if name.endswith(".py")]
        texts = {name.removeprefix("quire_server/_packages/"): archive.read(name).decode() for name in paths}
    return {path[:-3].replace("/", ".").removesuffix(".__init__"): text for path, text in texts.items()}


def test_the_server_imports_only_modules_that_it_has(wheels: tuple[Path, Path]) -> None:
    """No module imports one that the wheel leaves out, not even inside a function that few commands call."""
    sources = _modules(wheels[1])
    tree = {path.relative_to(ROOT) for name in (*PRIVATE, "quire_server") for path in (ROOT / name).rglob("*.py")}
    every = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in tree}
    missing = {
        f"{name} imports {each}" for name, text in sources.items() for each in imports(text, every - set(sources))
    }

    assert every - set(sources), "something is left out"
    assert sorted(missing) == []


@pytest.mark.every(3)
def test_every_module_of_the_server_can_be_imported(installed: Environment, wheels: tuple[Path, Path]) -> None:
    """Each module finds everything it needs in the installed wheels and their requirements."""
    names = [name for name in _modules(wheels[1]) if not name.endswith("__main__")]
    code = (
        "import importlib, sys, quire_server.entry; quire_server.entry.add_packages()\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except Exception as error: print(name, repr(error))\n"
    )

    assert len(names) > 400
    assert installed.run("-c", code, *sorted(names)) == ""
