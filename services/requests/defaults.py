"""Sampling defaults of the served checkpoint, from its `generation_config.json`.

The defaults are filled into a request before validation, so all APIs have the same defaults. A value in the request is
never replaced, even if it equals the default of the API. `max_new_tokens` is a limit on all requests, as in vLLM.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.v1 import generation_pb2 as v1
from services.requests.validation import check_sampling_ranges
from shared.config import ConfigError
from shared.errors import FieldViolation, InvalidRequestError
from shared.json_text import describe_json_error

FILE = "generation_config.json"
"""File name in a checkpoint folder."""
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_MAX_TOP_K = 0x7FFFFFFF
_REMEDY = "correct the file, or use --generation-config none"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for sampling options that a request omits."""

    source: str = "none"
    """The file that the values come from."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The values by their names in the file."""
    sampling: v1.SamplingOptions = field(default_factory=v1.SamplingOptions)
    """The same values as options of a request, without `max_new_tokens`."""

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of generated tokens per request; 0 if only the context limits it."""
        return int(self.values.get("max_new_tokens", 0))

    def default_max_tokens(self, setting: int) -> int:
        """Return the server's `max_tokens` for requests without one; 0 for the rest of the context."""
        given = [value for value in (setting, self.max_new_tokens) if value]
        return min(given, default=0)

    def fill(self, request: v1.GenerateRequest) -> None:
        """Fill the defaults into a request, and reduce its `max_tokens` to the limit.

        Raises:
            InvalidRequestError: `min_tokens` exceeds the limit.
        """
        if self.sampling.ByteSize():
            given = request.sampling
            filled = v1.SamplingOptions()
            filled.CopyFrom(self.sampling)
            filled.MergeFrom(given)  # Set optional fields replace the defaults.
            given.CopyFrom(filled)
        limit = self.max_new_tokens
        if not limit:
            return
        stop = request.stop
        if stop.min_tokens > limit:
            what = f"must be <= {limit}, the limit max_new_tokens in the model's {FILE}; lower it"
            raise InvalidRequestError(FieldViolation("stop.min_tokens", what))
        if stop.max_tokens > limit:
            stop.max_tokens = limit


def read_sampling_defaults(setting: str, folder: Path) -> SamplingDefaults:
    """Return the defaults that the setting `generation_config` selects.

    Args:
        setting: "auto" for the file in the model's folder, "none", or a path to a file or to a folder with such a file.
        folder: the model's folder.

    Raises:
        ConfigError: the file does not exist, or a value in it is not usable.
    """
    if setting == "none":
        return SamplingDefaults()
    path = folder if setting == "auto" else Path(setting).expanduser()
    if path.is_dir():
        path /= FILE
    if not path.is_file():
        if setting == "auto":
            return SamplingDefaults()
        raise ConfigError(
            f"generation_config: {path} does not exist; use auto, none, or the path of a {FILE} or of its folder"
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"generation_config: cannot read {path} ({error.strerror}); {_REMEDY}") from None
    except ValueError as error:
        raise ConfigError(f"generation_config: {path}: {describe_json_error(error)}; {_REMEDY}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"generation_config: {path}: must be a JSON object; {_REMEDY}")
    values, sampling = _values(document, path)
    return SamplingDefaults(str(path), values, sampling)


def _values(document: Mapping[str, Any], path: Path) -> tuple[dict[str, float], v1.SamplingOptions]:
    """Return the file's values by name, and as options of a request.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """
    values: dict[str, float] = {}
    sampling = v1.SamplingOptions()
    for name in (*_NUMBERS, "top_k", "max_new_tokens"):
        value = document.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if name not in _NUMBERS else int | float):
            kind = "a number" if name in _NUMBERS else "an integer"
            raise ConfigError(f"generation_config: {path}: {name}: must be {kind}; {_REMEDY}")
        if name == "max_new_tokens" and not 1 <= value <= _MAX_TOP_K:
            raise ConfigError(f"generation_config: {path}: {name}: must lie in [1, {_MAX_TOP_K}]; {_REMEDY}")
        if name == "top_k":
            value = min(max(value, 0), _MAX_TOP_K)  # -1 also means all tokens.
        values[name] = value
        if name != "max_new_tokens":
            setattr(sampling, name, _in_float_range(value) if name in _NUMBERS else value)
    for violation in check_sampling_ranges(sampling):
        name = violation.field.rpartition(".")[2]
        raise ConfigError(f"generation_config: {path}: {name}: {violation.description}; {_REMEDY}")
    return values, sampling


def _in_float_range(value: float) -> float:
    """Return the value as a float. An integer beyond the range of floats becomes infinite, which validation refuses."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")
