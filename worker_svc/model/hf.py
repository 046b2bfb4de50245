"""placeholder"""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from shared.config import ConfigError
from worker_svc.model.base import Model


def load(
    architecture: str,
    config: PretrainedConfig,
    folder: Path,
    *,
    seed: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Model:
    raise ConfigError(f"model: {architecture} is not supported")
