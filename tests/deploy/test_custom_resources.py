"""Custom resources: their fields are those of the schemas that their projects publish."""

import json
import os
from pathlib import Path

import jsonschema
import pytest

from tests.deploy.custom_resources import FIELDS, custom_objects, kind_of, own_fields, published
from tests.deploy.manifests import EXAMPLES, needs_tools

pytestmark = needs_tools

_PUBLISHED = os.environ.get("QUIRE_CRDS", "")


@pytest.mark.parametrize("example", EXAMPLES)
def test_custom_resources_use_checked_fields(example: str) -> None:
    """Each field was found in a published schema: run `python -m tests.deploy.custom_resources` after a change."""
    checked = json.loads(FIELDS.read_text("utf-8"))
    for each in custom_objects(example):
        assert own_fields(each) <= set(checked[kind_of(each)]), kind_of(each)


@pytest.mark.release
@pytest.mark.skipif(not _PUBLISHED, reason="QUIRE_CRDS names no folder with the published schemas")
@pytest.mark.parametrize("example", EXAMPLES)
def test_custom_resources_are_valid_by_the_published_schemas(example: str) -> None:
    """Types, enumerations and patterns too."""
    schemas = published(Path(_PUBLISHED))
    for each in custom_objects(example):
        jsonschema.Draft202012Validator(schemas[kind_of(each)]).validate(each)
