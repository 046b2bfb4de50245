"""Which of the two paths a model takes: by hand where the class is known, else through `transformers`.

The second path is imported when it is taken: it brings most of `transformers` with it, and seconds of a worker's start.
"""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from shared.config import ConfigError
from worker_svc.model import llama, llama_packed
from worker_svc.model.base import Model

_RANDOM_SEED = 0


def check_supported(architecture: str, config: PretrainedConfig) -> None:
    """Refuses what neither path can run, as far as that is known without the weights.

    Raises:
        ConfigError: with the architecture, the reason, and what works.
    """
    if not llama.supports(architecture, config):
        from worker_svc.model import hf

        hf.check_class(architecture, config)


def build_model(
    architecture: str,
    config: PretrainedConfig,
    folder: Path,
    *,
    random_weights: bool,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    quantization: str = "none",
    kv_dtype: torch.dtype | None = None,
) -> Model:
    """The model with its weights on `device`; `check_supported` has passed.

    Args:
        architecture: class name from config.json.
        config: all of config.json.
        folder: where the weights are.
        random_weights: draw the weights instead of reading them, the same ones every time.
        dtype: type of weights and activations.
        device: where the model lives.
        num_positions: positions that will be asked for, from 0.
        quantization: form of the weights: "none" or "int8".
        kv_dtype: type of KV; None: `dtype`.

    Raises:
        ConfigError: neither path can run it, or the weights do not fit.
    """
    if not llama.supports(architecture, config):
        from worker_svc.model import hf

        if quantization != "none":
            raise ConfigError(f"quantization: {architecture} has no {quantization} weights here; give none")
        return hf.load(
            architecture,
            config,
            folder,
            seed=_RANDOM_SEED if random_weights else None,
            dtype=dtype,
            device=device,
        )
    model = llama.LlamaModel(
        architecture,
        config,
        dtype=dtype,
        device=device,
        num_positions=num_positions,
        cpu_kernels=llama_packed.choose_kernels(config, dtype, kv_dtype or dtype, device, quantization),
        quantization=quantization,
    )
    if random_weights:
        model.randomise(_RANDOM_SEED)
    else:
        model.load(folder)
    return model
