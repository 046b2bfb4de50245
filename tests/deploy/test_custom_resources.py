"""Custom resources are valid by the schemas that their projects publish."""

import copy
import functools
import operator
import re
from typing import Any

import pytest

from tests.deploy.custom_resources import CRDS, SOURCES, custom_objects, errors
from tests.deploy.manifests import EXAMPLES, needs_tools, objects

pytestmark = needs_tools

_WRONG: dict[str, tuple[str, Any]] = {
    "Certificate": ("spec.privateKey.algorithm", "DSA"),
    "GRPCRoute": ("spec.rules.0.backendRefs.0.group", "Not A Group"),
    "Gateway": ("spec.listeners.0.port", 99999),
    "HTTPRoute": ("spec.rules.0.matches.0.path.type", "Glob"),
    "InferencePool": ("spec.targetPorts.0.number", 0),
    "LeaderWorkerSet": ("spec.leaderWorkerTemplate.size", "two"),
    "PrometheusRule": ("spec.groups.0.rules.0.for", "ten minutes"),
    "ScaledObject": ("spec.triggers.0.metadata", ["query"]),
    "ServiceMonitor": ("spec.endpoints.0.interval", "often"),
}
"""A field of each kind, and a value that its project refuses."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_custom_resources_are_valid_by_the_published_schemas(example: str) -> None:
    """No field is unknown; types, enumerations, limits and patterns follow the release named in `crds/`."""
    for each in custom_objects(example):
        assert errors(each) == [], f"{each['kind']} {each['metadata']['name']}"


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_a_wrong_custom_resource_is_noticed(kind: str) -> None:
    """Each kind is rendered by an example, and a wrong value, an unknown field or another version of it is an error."""
    there = next(each for example in EXAMPLES for each in objects(example) if each["kind"] == kind)
    path, value = _WRONG[kind]
    wrong: Any = copy.deepcopy(there)
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    functools.reduce(operator.getitem, above, wrong)[last] = value
    place = re.sub(r"\.(\d+)", r"[\1]", f"$.{path}")

    assert [each for each in errors(wrong) if each.startswith(f"{place}: ")]
    assert "colour" in errors({**there, "spec": {**there["spec"], "colour": "red"}})[0]
    assert "has no" in errors({**there, "apiVersion": f"{there['apiVersion']}0"})[0]


def test_schemas_are_listed_with_release_and_licence() -> None:
    """The README beside the schemas names the release of each project and the licence."""
    text = (CRDS / "README.md").read_text("utf-8")

    for source in SOURCES.values():
        assert f"| {source.repository} | {source.release} | Apache-2.0 |" in text
    assert {path.stem for path in CRDS.glob("*.json")} == set(SOURCES)
