"""Safetensors files of a checkpoint, read one tensor at a time.

Only safetensors: the other format of the hub is pickle, which runs code.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shared.config import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that hold the weights, in order of name.

    Raises:
        ConfigError: there are none, or the index names one that is missing.
    """
    if (folder / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(f"model: {folder / _INDEX} is no index of safetensors files") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"model: {folder} lacks {missing[0]}, which its index names")
        return tuple(folder / name for name in names)
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    raise ConfigError(f"model: {folder} holds no {_SINGLE}; only safetensors weights are read")


def copy_weights(folder: Path, destinations: Mapping[str, torch.Tensor], optional: frozenset[str]) -> None:
    """Copies each tensor of the checkpoint straight into its destination, so that no second copy of the model exists.

    Args:
        folder: the checkpoint.
        destinations: for each name in the checkpoint the (view of a) tensor it goes to.
        optional: names that may be in the checkpoint and are not needed.

    Raises:
        ConfigError: a tensor is missing, has another shape, or is not known.
    """
    missing = set(destinations)
    for name, tensor in _tensors(folder):
        destination = destinations.get(name)
        if destination is None:
            if name in optional or name.endswith("rotary_emb.inv_freq"):
                continue
            raise ConfigError(f"model: the checkpoint holds {name}, which its architecture does not have")
        if destination.shape != tensor.shape:
            raise ConfigError(
                f"model: {name} has shape {tuple(tensor.shape)}, config.json asks for {tuple(destination.shape)}"
            )
        destination.copy_(tensor)
        missing.discard(name)
    if missing:
        raise ConfigError(f"model: the checkpoint lacks {min(missing)} ({len(missing)} tensors missing)")


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"model: {file} is damaged: {error}") from None
