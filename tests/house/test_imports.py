"""The import rules of docs/architecture.md: no circles, the "may import" table, the order of packages."""

import ast
import re
from collections.abc import Container, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "quire",
    "quire_server",
    "services",
    "scheduler_svc",
    "worker_svc",
    "kernels",
    "shared",
    "checks",
    "measure",
    "records",
    "tools",
    "tests",
)


def imports(source: str, modules: Container[str]) -> Iterator[str]:
    """Yield those of the modules that a source text imports, also in functions and for type checkers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{each.name}" for each in node.names]
            found = [name if name in modules else node.module for name in names]
            yield from (name for name in found if name in modules)


def circle(sources: Mapping[str, str]) -> list[str] | None:
    """Return the modules in an import cycle, each followed by one that imports it, or None."""
    graph = {name: set(imports(source, sources)) - {name} for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_no_modules_import_each_other() -> None:
    """The imports have no circle, counting those inside functions and those for type checkers."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]

    assert len(paths) > 400
    assert circle({name: path.read_text() for name, path in zip(names, paths, strict=True)}) is None


@pytest.mark.parametrize(
    "back", ["import a.b", "from a import b", "def f():\n  from a.b import x", "from a.b import x"]
)
def test_a_circle_of_imports_is_found(back: str) -> None:
    """A cycle over three modules is found, however its last import is written; a package may import its modules."""
    found = circle({"a": "from a.b import x", "a.b": "import c", "c": "import d", "d": back})

    assert found is not None
    assert set(found) == {"a.b", "c", "d"}
    assert circle({"a": "from a.b import x", "a.b": "import c", "c": ""}) is None


def _may_import() -> dict[str, set[str]]:
    """Return the "may import" table of docs/architecture.md: what each folder may import."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = page.split("| folder | role | may import |", 1)[1].split("\n\n", 1)[0]
    rows = [line.split("|") for line in table.splitlines() if "`" in line]
    found: dict[str, set[str]] = {}
    for row in rows:
        above = set(found) if "every folder above" in row[3] else set()
        found[row[1].strip(" `/")] = above | set(re.findall(r"\w+", row[3]))
    return found


_MAY_IMPORT = _may_import()
ABOVE_SERVING = ("records", "measure", "checks", "tests")
"""Packages that read recordings, measure, verify and test, each above all earlier ones; serving packages are below."""
_SERVING = ("quire", "quire_server", "services", "scheduler_svc", "worker_svc", "kernels", "shared", "protos")
_STUBS = ("quire.v1", "quire.admin.v1", "quire.__version__")


@pytest.mark.parametrize("folder", sorted(set(_MAY_IMPORT) - {"protos"}))
def test_a_folder_imports_only_what_the_architecture_page_allows(folder: str) -> None:
    """The "may import" table holds, also inside functions; the services import only stubs and version of quire."""
    ruled = set(_MAY_IMPORT) | {"checks", "tools", "tests", "torch", "triton"}
    against = []
    for path in (ROOT / folder).rglob("*.py"):
        for name in _imported(path.read_text("utf-8")):
            top = name.split(".")[0]
            allowed = top == folder or top not in ruled or top in _MAY_IMPORT[folder]
            stubs_only = folder not in ("services", "scheduler_svc") or top != "quire" or name.startswith(_STUBS)
            if not (allowed and stubs_only):
                against.append(f"{path.relative_to(ROOT)} imports {name}")

    assert against == []


def test_serving_lies_below_what_reads_records_measures_and_verifies() -> None:
    """The order is serving, records, measure, checks, tests: no module imports from a later package."""
    against = []
    for folder in (*_SERVING, *ABOVE_SERVING):
        later = ABOVE_SERVING[ABOVE_SERVING.index(folder) + 1 :] if folder in ABOVE_SERVING else ABOVE_SERVING
        for path in (ROOT / folder).rglob("*.py"):
            names = _imported(path.read_text("utf-8"))
            against += [f"{path.relative_to(ROOT)} imports {name}" for name in names if name.startswith(later)]

    assert against == []


def test_only_the_link_of_a_worker_knows_protobuf() -> None:
    """Behind the link a plan, a result and all they contain are values of `worker_svc.interface`."""
    users = {
        path.relative_to(ROOT / "worker_svc").parts[0]
        for path in (ROOT / "worker_svc").rglob("*.py")
        for name in _imported(path.read_text("utf-8"))
        if name.startswith(("protos.", "google.protobuf"))
    }

    assert users == {"link"}


def _imported(source: str) -> Iterator[str]:
    """Yield the dotted name of everything that a source text imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)


ORDERS = {
    "scheduler_svc.core": (
        "interface", "memory", "requests", "workers", "queueing", "lifecycle", "planning", "scheduler"
    ),
    "services": (
        "errors", "metrics", "tail", "access", "text", "parsers", "grammars", "requests", "streams", "link", "calls",
        "grpc", "http", "frontend"
    ),
    "worker_svc": (
        "interface", "device", "ranks", "model", "memory", "outputs", "rows", "speculation", "execution", "link",
        "loop", "follower", "main",
    ),
}  # fmt: skip
"""The packages and top modules in a package, in reading order; each imports only itself and earlier ones."""


@pytest.mark.parametrize("package", ORDERS)
def test_packages_are_in_order(package: str) -> None:
    """A package imports only itself and earlier packages, in the order of its parent's docstring."""
    order = ORDERS[package]
    root = ROOT.joinpath(*package.split("."))
    assert {path.stem for path in root.iterdir()} - {"__init__", "__pycache__"} == set(order)
    paths = [path for path in (ROOT / package.split(".")[0]).rglob("*.py") if path.name != "__init__.py"]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    against = []
    for path in root.rglob("*.py"):
        part = path.relative_to(root).parts[0].removesuffix(".py")
        own = order.index(part) if part in order else None
        for name in imports(path.read_text("utf-8"), modules):
            imported = name.removeprefix(f"{package}.").split(".")[0]
            if imported not in order or (own is not None and order.index(imported) > own):
                against.append(f"{path.relative_to(root)} imports {name}")

    assert against == []


@pytest.mark.parametrize("package", ORDERS)
def test_packages_are_listed_in_order(package: str) -> None:
    """A package's docstring lists its packages and top modules in reading order."""
    text = ROOT.joinpath(*package.split("."), "__init__.py").read_text("utf-8").partition("in this order")[2]

    assert tuple(re.findall(r"(?:^\* |; )`(\w+)` ", text, re.MULTILINE)) == ORDERS[package]
