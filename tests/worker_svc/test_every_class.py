"""Every configuration class of the installed `transformers` is served, or refused in one line."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import logging as transformers_logging
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from checks.driver import CPU
from shared.config import ConfigError, WorkerConfig
from worker_svc.model.loader import describe_model

_MAPPINGS: list[Any] = [
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
]
_TYPES = sorted(CONFIG_MAPPING.keys())
_ONCE_FAILED = ["voxtral", "qwen2_audio", "siglip", "musicgen", "encoder-decoder", "gemma4_text", "sam3_lite_text"]
"""Types without fields that every text model has."""
_DRAWN = sorted({*_ONCE_FAILED, *random.Random(0).sample(_TYPES, 40)})


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    yield
    transformers_logging.set_verbosity(level)


def architecture_of(model_type: str) -> str:
    """The class that a checkpoint of this type names: the first text-generating one, or any."""
    names = [mapping[model_type] for mapping in _MAPPINGS if model_type in mapping]
    name = names[0] if names else "UnknownModel"
    return name if isinstance(name, str) else name[0]


def check(model_type: str, folder: Path) -> bool:
    """Describe a model with its type's default sizes; return whether it is supported, as far as that shows."""
    try:
        values = CONFIG_MAPPING[model_type]().to_dict()
    except Exception:  # This class has no defaults, so its file contains only the type.
        values = {"model_type": model_type}
    values["architectures"] = [architecture_of(model_type)]
    (folder / "config.json").write_text(json.dumps(values, default=str))
    try:
        describe_model(WorkerConfig(model=str(folder), load_format="random"), CPU)
    except ConfigError as error:
        line = str(error)
        assert line.startswith(("model: ", "max_model_len: ")), line
        assert "\n" not in line, line
        return False
    return True


@pytest.mark.parametrize("model_type", _DRAWN)
def test_a_class_is_supported_or_refused_in_one_line(model_type: str, tmp_path: Path) -> None:
    """No configuration of `transformers` ends the worker with a traceback (types of earlier defects, and 40 drawn)."""
    check(model_type, tmp_path)


@pytest.mark.release
def test_all_classes_are_supported_or_refused_in_one_line(tmp_path: Path) -> None:
    """As above, for all of them."""
    failed = {}
    supported = 0
    for model_type in _TYPES:
        try:
            supported += check(model_type, tmp_path)
        except Exception as error:
            failed[model_type] = repr(error)

    assert not failed
    assert 80 < supported < len(_TYPES) / 2
