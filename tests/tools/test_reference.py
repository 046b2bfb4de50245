"""docs/metrics.md holds every metric, span and attribute."""

import ast
import re
from collections.abc import Iterator

import pytest

from shared import metric_names, span_names
from shared.metric_names import Metric
from tools.reference import PAGE, ROOT, page

FOLDERS = ("services", "scheduler_svc", "worker_svc", "shared")
_ATTRIBUTE = re.compile(r"(?:quire|gen_ai|rpc|http|url|error)\.[a-z0-9_.]+")
_ASGI = {"http.response.start", "http.response.body", "http.disconnect"}
"""Types of ASGI's messages, which look like attributes."""


def test_the_page_is_up_to_date() -> None:
    """A definition that changes appears on the page: run `python -m tools.reference`."""
    assert PAGE.read_text("utf-8") == page()


def test_every_span_has_a_defined_name() -> None:
    """Code starts spans only under names in `shared.span_names`, or under its operation's name.

    A helper that starts a span gets the name from its callers.
    """
    given = {"start_span": 0, "start_as_current_span": 0, "_made": 0, "part_span": 1}
    unnamed = []
    for path, tree in _modules():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            function = ast.unparse(call.func).rpartition(".")[2]
            if function not in given:
                continue
            name = ast.unparse(call.args[given[function]])
            if not name.startswith(("span_names.", "operation.name")) and name not in ("name", "call.name"):
                unnamed.append(f"{path}:{call.lineno}")

    assert unnamed == []


def test_every_attribute_is_defined_and_set() -> None:
    """Modules that set span attributes use exactly the defined ones."""
    used: set[str] = set()
    for path, tree in _modules():
        if path.endswith("tracing.py") or path in ("services/http/endpoint.py", "services/tail.py"):
            texts = {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)}
            used |= {text for text in texts if isinstance(text, str) and _ATTRIBUTE.fullmatch(text)}
    defined = span_names.ATTRIBUTES.keys() | span_names.OPT_IN_ATTRIBUTES.keys()

    assert used - _ASGI == defined
    assert {name for info in span_names.SPANS.values() for name in info.attributes} == span_names.ATTRIBUTES.keys()


@pytest.mark.parametrize("constant", [name for name, value in vars(metric_names).items() if isinstance(value, Metric)])
def test_every_metric_is_used(constant: str) -> None:
    """A definition that no process uses is not on the page."""
    sources = "".join((ROOT / folder / "metrics.py").read_text("utf-8") for folder in ("services", "scheduler_svc"))

    assert f"names.{constant}" in sources


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.startswith("span_names"):
                yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))
