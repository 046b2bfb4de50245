"""Checks custom resources against the published schemas of their projects.

    python -m tests.deploy.custom_resources FOLDER

FOLDER has files with CustomResourceDefinitions, as the projects publish them. The schemas are not part of this
repository. The check is strict: an unknown field is an error. It writes `custom_fields.json`: the fields of the
rendered objects that a published schema has. A test fails when a manifest uses a field that is not in this list.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.manifests import EXAMPLES, Object, objects

FIELDS = Path(__file__).with_name("custom_fields.json")
_GROUPS = (
    "cert-manager.io", "gateway.networking.k8s.io", "inference.networking.k8s.io", "keda.sh",
    "leaderworkerset.x-k8s.io", "monitoring.coreos.com",
)  # fmt: skip


def custom_objects(example: str) -> Iterator[Object]:
    """Yield the objects of an example that Kubernetes itself does not define."""
    for each in objects(example):
        if each["apiVersion"].partition("/")[0] in _GROUPS:
            yield each


def kind_of(each: Object) -> str:
    """Return the version and kind of an object."""
    return f"{each['apiVersion']} {each['kind']}"


def fields(value: Any, path: str = "") -> set[str]:
    """Return the path of each field of an object; entries of a list have the path of the list."""
    if isinstance(value, dict):
        return {f"{path}.{key}" for key in value} | {
            found for key, inner in value.items() for found in fields(inner, f"{path}.{key}")
        }
    if isinstance(value, list):
        return {found for inner in value for found in fields(inner, path)}
    return set()


def own_fields(each: Object) -> set[str]:
    """Return the fields that the custom resource defines; names of labels and of trigger options are free."""
    free = (".labels.", ".matchLabels.", ".annotations.", ".metadata.", ".requests.", ".limits.")
    return {path for path in fields({"spec": each["spec"]}) if not any(name in path for name in free)}


def published(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the strict schemas of the CustomResourceDefinitions in a folder, by version and kind."""
    schemas = {}
    for path in sorted(folder.glob("*.yaml")):
        documents = [each for each in yaml.load_all(path.read_text("utf-8"), Loader=yaml.CSafeLoader) if each]
        for definition in (one for each in documents for one in each.get("items", [each])):
            if definition.get("kind") != "CustomResourceDefinition":
                continue
            spec = definition["spec"]
            for version in spec["versions"]:
                schema = _strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                schemas[f"{spec['group']}/{version['name']} {spec['names']['kind']}"] = schema
    return schemas


def _strict(schema: Any) -> Any:
    """Return a schema that refuses unknown fields, as the API server does with strict validation."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(pattern := schema.get("pattern"), str) and "(?i)" in pattern:
        strict["pattern"] = "(?i)" + pattern.replace("(?i)", "")  # Go allows it anywhere
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in schema and isinstance(schema["properties"], dict) and schema.get("type") == "object":
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if not open_ended:
            strict["additionalProperties"] = False
    return strict


def main(folder: str) -> int:
    """Validate the custom resources of every example, and write the list of their fields."""
    schemas = published(Path(folder))
    found: dict[str, set[str]] = {}
    for example in EXAMPLES:
        for each in custom_objects(example):
            jsonschema.Draft202012Validator(schemas[kind_of(each)]).validate(each)
            found.setdefault(kind_of(each), set()).update(own_fields(each))
    text = json.dumps({kind: sorted(paths) for kind, paths in sorted(found.items())}, indent=1)
    FIELDS.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
