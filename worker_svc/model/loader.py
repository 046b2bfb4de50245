"""Loads a model from a configuration, and describes it for the rest of the system."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.kv_quantised import DTYPES
from shared.config import ConfigError, WorkerConfig
from shared.kv_sizes import KV_TYPES, unsuitable_heads
from shared.logging import get_logger
from shared.model_path import resolve_model, served_name
from worker_svc.model import config as model_config
from worker_svc.model.base import Model
from worker_svc.model.config_reader import read_own
from worker_svc.model.decoder_config import ModelConfig, text_config
from worker_svc.model.fingerprint import fingerprint
from worker_svc.model.registry import build_model, check_supported
from worker_svc.ranks.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Description of a loaded model."""

    name: str
    architecture: str
    fingerprint: str
    """Fingerprint over everything that affects the results; SHA-256, hex."""
    max_model_len: int
    """Longest sequence in tokens."""
    vocab_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Type of the KV cache; for a quantised cache, see `kernels.kv_quantised.DTYPES`."""
    eos_token_ids: tuple[int, ...]
    break_even_context: int
    """Context length in tokens at which a token's attention costs as much as its matrix products; 0 if unknown."""
    weights_per_layer: int
    """Number of weights in one layer's matrix products for a token; 0 if unknown."""
    folder: Path
    """The checkpoint."""

    @property
    def dtype_name(self) -> str:
        """Name of `dtype` as in configuration files, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


def load_model(
    config: WorkerConfig, device: torch.device, group: Group | None = None
) -> tuple[Model, ModelDescription]:
    """Load the model that `config` names, on `device`; with a group, this rank's part of it.

    Raises:
        ConfigError: the folder is invalid, the architecture is not supported, the weights do not match config.json, or
            `max_model_len` exceeds the model's positions.
    """
    content, description = describe_model(config, device)
    model = build_model(
        description.architecture,
        content,
        description.folder,
        random_weights=config.load_format == "random",
        dtype=description.dtype,
        device=device,
        num_positions=description.max_model_len,
        quantization=config.quantization,
        group=group,
    )
    _check_heads(config.kv_cache_dtype, [width for shape in model.kv_shapes for width in shape.widths])
    return model, description


def _check_heads(kv_type: str, widths: Sequence[int]) -> None:
    """Check that keys and values with these numbers of elements have the layout of a cache type, if it has one.

    Raises:
        ConfigError: they do not.
    """
    if kv_type in KV_TYPES and (reason := unsuitable_heads(kv_type, widths)):
        raise ConfigError(f"kv_cache_dtype: {reason}")


def describe_model(config: WorkerConfig, device: torch.device) -> tuple[ModelConfig, ModelDescription]:
    """Read config.json of the model that `config` names, adjusted to the settings; reads no weights.

    Raises:
        ConfigError: the folder is invalid, the architecture is not supported as far as config.json shows, or
            `max_model_len` exceeds the model's positions.
    """
    random_weights = config.load_format == "random"
    folder = resolve_model(config.model, weights=not random_weights)
    content = read_own(folder) or model_config.read_config(folder)
    architecture = model_config.architecture(content)
    check_supported(architecture, content)
    max_model_len = model_config.position_limit(content, config.max_model_len)
    original_length = model_config.fix_long_rope(content, max_model_len)
    if original_length:
        get_logger().info(
            "positions: max_model_len exceeds the model's original length, so the long factors of longrope apply to all"
            " requests; lower max_model_len to the original length for the short ones",
            max_model_len=max_model_len,
            original_length=original_length,
        )
    dtype = model_config.choose_dtype(content, config.dtype, device)
    kv_dtype = DTYPES.get(config.kv_cache_dtype, dtype)
    return content, ModelDescription(
        name=config.served_model_name or served_name(config.model),
        architecture=architecture,
        fingerprint=fingerprint(
            folder,
            dtype,
            with_weights=not random_weights,
            kv_dtype=kv_dtype,
            quantization=config.quantization,
            long_rope=original_length > 0,
        ),
        max_model_len=max_model_len,
        vocab_size=text_config(content).vocab_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        eos_token_ids=model_config.eos_token_ids(folder, content),
        break_even_context=model_config.break_even_context(content),
        weights_per_layer=model_config.weights_per_layer(content),
        folder=folder,
    )
