"""Reader of safetensors and GGUF checkpoints, one tensor at a time.

For a multimodal model, only the tensors of its text part are read. They get the names used in a text-only model.

A quantised linear layer has several tensors, which are read together. Its weight is a `StoredWeight` under the name
that it would have unquantised.

Pickle checkpoints are not supported, because loading them can execute code.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shared.config import ConfigError
from worker_svc.model import gguf
from worker_svc.model.quantised import (
    MAIN_PARTS,
    OTHER_PARTS,
    SCALES,
    StoredWeight,
    StoredWeights,
    log_form,
    read_weight,
)
from worker_svc.model.scheme import Quantisation, read_quantisation
from worker_svc.ranks.shard import Cut

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
_OTHER_MEDIA = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector."),
    *("audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."),
)
"""Name prefixes of tensors outside the text part."""


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files, sorted by name: safetensors, or one GGUF file.

    Raises:
        ConfigError: there are none, a file of the index is missing, or there are several GGUF files.
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
    if (file := gguf.find(folder)) is not None:
        return (file,)
    raise ConfigError(f"model: {folder} has no {_SINGLE}; use a checkpoint with safetensors weights")


def copy_weights(
    folder: Path,
    destinations: Mapping[str, torch.Tensor],
    optional: frozenset[str],
    stored: StoredWeights | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> None:
    """Copy each checkpoint tensor to its destination, without a second copy of the model in memory.

    Args:
        folder: the checkpoint.
        destinations: for each checkpoint tensor's name, the tensor or view to which it is copied.
        optional: names in the checkpoint to ignore.
        stored: receives the quantised weights instead of their destinations; None to dequantise them.
        cuts: for each name, the part of the tensor to copy; other tensors are copied whole.

    Raises:
        ConfigError: a tensor is missing, unknown, or has the wrong shape.
    """
    missing, num_dequantised = set(destinations), 0
    for name, tensor in read_tensors(folder):
        destination = destinations.get(name)
        if destination is None:
            if name in optional or name.endswith("rotary_emb.inv_freq") or _is_padding(name, tensor):
                continue
            raise ConfigError(
                f"model: the checkpoint has a tensor {name}, which its architecture does not have; use a checkpoint"
                " that matches config.json"
            )
        cut = (cuts or {}).get(name)
        required = tuple(cut.whole if cut and dim == cut.dim else n for dim, n in enumerate(destination.shape))
        if required != tensor.shape:
            raise ConfigError(
                f"model: {name} has shape {tuple(tensor.shape)}, but config.json requires {required}; use a checkpoint"
                " that matches config.json"
            )
        if isinstance(tensor, torch.Tensor):
            if not tensor.is_floating_point():
                raise _not_described(name, f"has the type {str(tensor.dtype).removeprefix('torch.')}")
            destination.copy_(cut.of(tensor) if cut else tensor)
        else:
            part = _part(tensor, cut)
            if stored is not None and part is not None:
                stored.put(name, destination, part)
            else:
                whole = tensor.dequantised()
                destination.copy_(cut.of(whole) if cut else whole)
                num_dequantised += 1
        missing.discard(name)
    if missing:
        raise ConfigError(
            f"model: the checkpoint lacks {min(missing)} ({len(missing)} tensors missing); use a complete checkpoint"
        )
    if num_dequantised:
        log_form(num_packed=0, num_dequantised=num_dequantised, dtype=next(iter(destinations.values())).dtype)


def _part(tensor: StoredWeight, cut: Cut | None) -> StoredWeight | None:
    """Return the codes and scales of a cut; None if it is no range of whole blocks."""
    if cut is None:
        return tensor
    if len(cut.spans) > 1:
        return None
    return tensor.narrow(cut.dim, cut.spans[0].begin, cut.spans[0].length)


def check_unquantised(folder: Path) -> None:
    """Check that a safetensors checkpoint has no integer weights, because its config.json describes none.

    Raises:
        ConfigError: there are no weights, a file is damaged, or a weight is quantised.
    """
    for file in weight_files(folder):
        if file.suffix == gguf.SUFFIX:
            continue
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                part = _split(name)[1]
                if part in (*MAIN_PARTS, *SCALES):
                    raise _not_described(name, "stores a quantised weight")
                if part == "weight" and opened.get_slice(name).get_dtype() in _INTEGERS:
                    raise _not_described(name, f"has the type {opened.get_slice(name).get_dtype()}")


def _not_described(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"model: {name} {what}, but config.json does not describe it as quantised; use a checkpoint that matches"
        " config.json"
    )


def is_quantised(folder: Path) -> bool:
    """Return whether a checkpoint has quantised weights.

    Raises:
        ConfigError: there are no weights, or config.json describes a quantisation that is not supported.
    """
    return weight_files(folder)[0].suffix == gguf.SUFFIX or read_quantisation(folder) is not None


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of all tensors in a safetensors checkpoint.

    Raises:
        ConfigError: there are no weights, or a file is damaged.
    """
    names: set[str] = set()
    for file in weight_files(folder):
        if file.suffix != gguf.SUFFIX:
            with _opened(file) as opened:
                names.update(opened.keys())
    return frozenset(map(_name_in_text, names)) if _has_other_media(folder) else frozenset(names)


def holds_different(folder: Path, first: str, second: str) -> bool:
    """Return whether the checkpoint has both tensors and they differ."""
    found = [
        tensor if isinstance(tensor, torch.Tensor) else tensor.dequantised()
        for _, tensor in read_tensors(folder, only=(first, second))
    ]
    return len(found) == 2 and not torch.equal(*found)


def read_tensors(
    folder: Path, only: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    """Yield the name and value of each tensor of the checkpoint; only those in `only`, if given.

    Raises:
        ConfigError: a file is damaged, or the tensors of a quantised layer do not match config.json.
    """
    files = weight_files(folder)
    if files[0].suffix == gguf.SUFFIX:
        yield from gguf.read_tensors(files[0], folder, only)
        return
    quantisation = read_quantisation(folder)
    with ExitStack() as stack:
        places: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(_opened(file))
            places |= dict.fromkeys(opened.keys(), (file, opened))

        def value(name: str) -> torch.Tensor:
            file, opened = places[name]
            try:
                tensor: torch.Tensor = opened.get_tensor(name)
            except SafetensorError as error:
                raise _damaged(file, error) from None
            return tensor

        if quantisation is not None and not any(_is_main(*_split(name), places) for name in places):
            raise ConfigError(
                f"model: config.json has a quantization_config ({quantisation.method}), but the checkpoint has no"
                " quantised weight; remove the field, or use a checkpoint that matches config.json"
            )
        other_media = _has_other_media(folder)
        for name in places:
            layer, part = _split(name)
            quantised = quantisation is not None and _is_main(layer, part, places)
            if quantisation is not None and part in OTHER_PARTS and not quantised:
                continue
            plain = (layer if part == "blocks" else f"{layer}.weight") if quantised else name
            if other_media:
                plain = _name_in_text(plain)
            if not plain or (only is not None and plain not in only):
                continue
            if quantised and quantisation is not None:
                yield plain, _read_layer(layer, places, value, quantisation)
                continue
            tensor = value(name)
            if quantisation is not None and part == "weight" and tensor.element_size() == 1:
                raise ConfigError(
                    f"model: the checkpoint lacks {layer}.{' or '.join(SCALES)}, which its quantised weight needs;"
                    " use a complete checkpoint"
                )
            yield plain, tensor


def _has_other_media(folder: Path) -> bool:
    """Return whether config.json describes a model for several media."""
    return "vision_config" in json.loads((folder / "config.json").read_text())


def _name_in_text(name: str) -> str:
    """Return a tensor's name in a text-only model; "" if it belongs to another medium.

    There are two layouts: that of the hub (`language_model.model.…` or `model.…`, `visual.…`), and that of the classes
    in `transformers` 5 (`model.language_model.…`, `model.visual.…`).
    """
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    inner = name.removeprefix("model.")
    if inner.startswith("language_model."):
        return "model." + inner.removeprefix("language_model.")
    return "" if inner.startswith(_OTHER_MEDIA) else name


def _split(name: str) -> tuple[str, str]:
    """Split a tensor's name into the layer's name and the part's name.

    gpt-oss stores the experts of a layer in `…_blocks` and `…_scales`.
    """
    layer, _, part = name.rpartition("_" if name.endswith(("_blocks", "_scales")) else ".")
    return layer, part


def _is_main(layer: str, part: str, names: Collection[str]) -> bool:
    """Return whether a tensor holds the codes of a quantised layer."""
    return part in MAIN_PARTS or (part == "weight" and any(f"{layer}.{scales}" in names for scales in SCALES))


def _read_layer(
    layer: str, names: Collection[str], value: Callable[[str], torch.Tensor], quantisation: Quantisation
) -> StoredWeight:
    link = "_" if f"{layer}_blocks" in names else "."
    parts = [part for part in ("weight", *MAIN_PARTS, *OTHER_PARTS) if f"{layer}{link}{part}" in names]
    return read_weight(layer, {part: value(f"{layer}{link}{part}") for part in parts}, quantisation.scheme_of(layer))


def _is_padding(name: str, tensor: torch.Tensor | StoredWeight) -> bool:
    """Return whether a tensor is a bias of zeros, which tools for GPTQ add to layers without a bias."""
    return name.endswith(".bias") and isinstance(tensor, torch.Tensor) and not bool(tensor.any())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        opened: Any = safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise _damaged(file, error) from None
    with opened:
        yield opened


def _damaged(file: Path, error: SafetensorError) -> ConfigError:
    return ConfigError(f"model: {file} is damaged: {error}; download the file again")
