"""Nothing that turns bytes from outside into code: the house rule, held by reading every source file."""

import ast
from collections.abc import Iterator
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
    "protos",
    "tools",
    "checks",
    "measure",
    "records",
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile"}


def findings(source: str) -> Iterator[str]:
    """What is not allowed in a source text, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"{node.lineno}: {each.name}" for each in node.names if each.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"{node.lineno}: {node.module}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if name in CALLS:
                yield f"{node.lineno}: {name}"
            if name == "torch.load" and not _is(keywords.get("weights_only"), value=True):
                yield f"{node.lineno}: torch.load without weights_only"
            if "trust_remote_code" in keywords and not _is(keywords["trust_remote_code"], value=False):
                yield f"{node.lineno}: trust_remote_code"
            if _is(keywords.get("allow_pickle"), value=True) or name in ("yaml.load", "yaml.unsafe_load"):
                yield f"{node.lineno}: {name}"
            if _is(keywords.get("shell"), value=True):
                yield f"{node.lineno}: a shell"


def _is(node: ast.expr | None, *, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_no_source_file_turns_bytes_into_code() -> None:
    """No pickle, marshal, eval, unsafe torch.load or trust_remote_code anywhere in the product."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]

    found = [f"{path.relative_to(ROOT)}:{what}" for path in files for what in findings(path.read_text())]

    assert len(files) > 100
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import cloudpickle.compat", "eval('1')", "exec(text)",
        "torch.load(path)", "torch.load(path, weights_only=False)", "load(path, trust_remote_code=True)",
        "load(path, trust_remote_code=flag)", "numpy.load(path, allow_pickle=True)", "yaml.load(text)",
        "run(line, shell=True)",
    ],
)  # fmt: skip
def test_the_rule_bites(source: str) -> None:
    """Each kind is found."""
    assert list(findings(source))


def test_safe_forms_are_allowed() -> None:
    """Safe forms of the same calls are not reported."""
    assert not list(findings("torch.load(path, weights_only=True)\nmodel.eval()\nload(x, trust_remote_code=False)"))
