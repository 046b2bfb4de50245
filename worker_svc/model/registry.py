"""Choice of the implementation for a model: `llama` for the classes that it supports, `hf` for all others.

`hf` is imported only when needed, because it imports most of `transformers`, which takes seconds.
"""

from pathlib import Path

import torch

from shared.config import ConfigError
from worker_svc.model import families, llama, llama_packed, weight_only
from worker_svc.model.base import Model
from worker_svc.model.decoder_config import DecoderConfig, ModelConfig
from worker_svc.model.weights import is_quantised
from worker_svc.ranks.group import Group

_RANDOM_SEED = 0


def check_supported(architecture: str, config: ModelConfig) -> None:
    """Check that an implementation supports the architecture, as far as config.json shows.

    Raises: ConfigError: neither implementation supports it; the message contains the reason and alternatives.
    """
    if families.own_config(architecture, config) is None:
        from worker_svc.model import hf

        assert not isinstance(config, DecoderConfig), "config_reader reads what llama implements"
        hf.check_class(architecture, config)


def build_model(
    architecture: str,
    config: ModelConfig,
    folder: Path,
    *,
    random_weights: bool,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    quantization: str = "none",
    group: Group | None = None,
) -> Model:
    """Build the model with its weights on `device`; call `check_supported` before.

    Args:
        architecture: class name from config.json.
        config: all of config.json.
        folder: the checkpoint.
        random_weights: draw random weights with a fixed seed instead of reading them.
        dtype: type of weights and activations.
        device: the device of the model.
        num_positions: length of the longest sequence in tokens.
        quantization: quantization of the weights: "none", "int8" or "int4"; "fp8" on a GPU.
        group: the ranks that share the model; None if this process has the whole model.

    Raises:
        ConfigError: no implementation supports the model, or the weights do not match config.json.
    """
    if quantization == "fp8" and not weight_only.is_available(device):
        raise ConfigError(
            "quantization: fp8 needs a GPU, because int8 is faster and more accurate on a CPU; use int8 or none"
        )
    decoder = families.own_config(architecture, config)
    if decoder is not None and families.FAMILIES[decoder.model_type].needs_triton:
        decoder = decoder if weight_only.is_available(device) else None
    if decoder is None:
        from worker_svc.model import hf

        assert not isinstance(config, DecoderConfig), "config_reader reads what llama implements"
        if group is not None and group.size > 1:
            raise ConfigError(f"tensor_parallel_size: {group.size} is not supported for {architecture}; use 1")
        return hf.load(
            architecture,
            config,
            folder,
            seed=_RANDOM_SEED if random_weights else None,
            dtype=dtype,
            device=device,
            num_positions=num_positions,
            quantization=quantization,
        )
    if group is not None:
        for mixed in set(families.mixture_layers(decoder)):
            for size in {size for _, _, size in families.mlps("", decoder, mixed=mixed)}:
                group.shard.check(
                    num_heads=decoder.num_attention_heads,
                    intermediate_size=size,
                    vocab_size=decoder.vocab_size,
                )
    keeps_codes = weight_only.is_available(device) and (
        quantization != "none" or (not random_weights and is_quantised(folder))
    )
    cpu_kernels = None
    if not families.FAMILIES[decoder.model_type].needs_triton:
        cpu_kernels = llama_packed.choose_kernels(decoder, dtype, device, "none" if keeps_codes else quantization)
    model = llama.LlamaModel(
        decoder,
        dtype=dtype,
        device=device,
        num_positions=num_positions,
        cpu_kernels=cpu_kernels,
        quantization=quantization,
        group=group,
        keeps_codes=keeps_codes and cpu_kernels is None,
    )
    if random_weights:
        model.randomise(_RANDOM_SEED)
    else:
        model.load(folder)
    return model
