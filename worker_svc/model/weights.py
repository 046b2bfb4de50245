"""Reader of safetensors checkpoints, one tensor at a time.

Pickle checkpoints are not supported, because loading them can execute code.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shared.config import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files, sorted by name.

    Raises:
        ConfigError: there are none, or a file of the index is missing.
    """
    if (folder / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(
                f"model: {folder / _INDEX} is not an index of safetensors files; download it again"
            ) from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"model: {folder} lacks {missing[0]}, which its index lists; download it")
        return tuple(folder / name for name in names)
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    raise ConfigError(f"model: {folder} has no {_SINGLE}; give a checkpoint with safetensors weights")


def copy_weights(folder: Path, destinations: Mapping[str, torch.Tensor], optional: frozenset[str]) -> None:
    """Copy each tensor of the checkpoint to its destination, without a second copy of the model in memory.

    Args:
        folder: the checkpoint.
        destinations: the tensor, or view of a tensor, that each tensor of the checkpoint is copied to, by name.
        optional: names in the checkpoint to ignore.

    Raises:
        ConfigError: a tensor is missing, unknown, or has the wrong shape.
    """
    missing = set(destinations)
    for name, tensor in _tensors(folder):
        destination = destinations.get(name)
        if destination is None:
            if name in optional or name.endswith("rotary_emb.inv_freq"):
                continue
            raise ConfigError(
                f"model: the checkpoint has a tensor {name}, which its architecture does not have; use a checkpoint"
                " that matches config.json"
            )
        if destination.shape != tensor.shape:
            raise ConfigError(
                f"model: {name} has shape {tuple(tensor.shape)}, but config.json requires"
                f" {tuple(destination.shape)}; use a checkpoint that matches config.json"
            )
        destination.copy_(tensor)
        missing.discard(name)
    if missing:
        raise ConfigError(
            f"model: the checkpoint lacks {min(missing)} ({len(missing)} tensors missing); use a complete checkpoint"
        )


def holds_different(folder: Path, first: str, second: str) -> bool:
    """Return whether the checkpoint has both tensors and they differ."""
    found = [tensor for name, tensor in _tensors(folder, only=(first, second))]
    return len(found) == 2 and not torch.equal(*found)


def _tensors(folder: Path, only: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of each tensor of the checkpoint; only those in `only`, if given."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if only is None or name in only:
                        yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"model: {file} is damaged: {error}; download the file again") from None
