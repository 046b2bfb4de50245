"""Quantised checkpoints: the form in which config.json says that weights are stored.

A *scheme* describes the tensors of one quantised linear layer. The names of the checkpoint's tensors show which layers
are quantised, so lists of ignored layers are not needed. `quantised` reads the tensors that a scheme describes.

compressed-tensors has its own library, which is imported only for its checkpoints because the import takes seconds.
The other methods have a few fields, which are read here.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from shared.config import ConfigError

_MODELOPT = "hf_quant_config.json"
"""File of older versions of NVIDIA's ModelOpt, instead of the field in config.json."""


class Layout(Enum):
    """Names and packing of one layer's tensors."""

    PLAIN = "plain"
    """`weight` in int8 or e4m3, `weight_scale` or `weight_scale_inv`, perhaps `weight_zero_point`."""
    PACKED = "packed"
    """`weight_packed` int32 along the inputs, `weight_scale`, perhaps `weight_zero_point` and `weight_g_idx`."""
    GPTQ = "gptq"
    """`qweight` int32 along the inputs, transposed; `qzeros`, `scales`, `g_idx`."""
    AWQ = "awq"
    """`qweight` int32 along the outputs, transposed and interleaved; `qzeros`, `scales`."""
    FP4 = "fp4"
    """Pairs of e2m1 codes in uint8: `weight_packed`, `weight` or `…_blocks`; `weight_scale` or `…_scales`; perhaps
    `weight_global_scale` (the scales are divided by it) or `weight_scale_2` (they are multiplied with it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Stored form of a linear layer's weight."""

    layout: Layout
    bits: int
    group_size: int = 0
    """Number of inputs that share a scale; 0 if the scales' shapes determine it."""
    block: tuple[int, int] | None = None
    """Numbers of outputs and inputs per block with one scale; None for no blocks."""
    has_zero_points: bool = False
    """Whether each weight has zero points. Formats that always store them need no flag."""
    has_order: bool = False
    """Whether the groups of inputs are not consecutive, so that each weight has `g_idx` or `weight_g_idx`."""
    zeros_stored_less_one: bool = False
    """Whether `qzeros` hold the zero points minus one, as in the first version of GPTQ."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Schemes of a checkpoint."""

    method: str
    """Method as config.json names it, such as "gptq"."""
    rules: tuple[tuple[str, Scheme], ...]
    """Targets with their schemes; the first target that matches a layer applies."""

    def scheme_of(self, layer: str) -> Scheme:
        """Return the scheme of a quantised layer, by its name in the checkpoint.

        Raises:
            ConfigError: no target matches the layer.
        """
        for target, scheme in self.rules:
            if _matches(layer, target):
                return scheme
        raise ConfigError(
            f"model: {layer} is quantised in the checkpoint, but no group of quantization_config in config.json matches"
            " it; use a checkpoint that matches config.json"
        )


def read_quantisation(folder: Path) -> Quantisation | None:
    """Return how the checkpoint's weights are quantised; None if they are not.

    Raises:
        ConfigError: the method, or an option of it, is not supported.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        found = [part.get("quantization_config") for part in (config, config.get("text_config") or {})]
        if not any(found) and (folder / _MODELOPT).is_file():
            modelopt = json.loads((folder / _MODELOPT).read_text())
            found = [{"quant_method": "modelopt", **modelopt["quantization"]}]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None  # `read_config` reports this case.
    raw = next((each for each in found if each is not None), None)
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"model: quantization_config of config.json is a {type(raw).__name__}, not an object; correct it, or use"
            " another checkpoint"
        )
    method = str(raw.get("quant_method", "")).lower().replace("_", "-")
    reader = _READERS.get(method)
    if reader is None:
        raise ConfigError(
            f"model: the quantisation method {method or '(none)'} of config.json is not supported; use a checkpoint in"
            " the layout of compressed-tensors, GPTQ, AWQ, FP8, MXFP4, ModelOpt or GGUF, or an unquantised one with"
            " --quantization"
        )
    try:
        return Quantisation(method, reader(raw))
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, re.error) as error:
        raise ConfigError(
            f"model: quantization_config of config.json is not valid for {method}: {_what(error)}; correct it, or"
            " use another checkpoint"
        ) from None


def _compressed_tensors(raw: Mapping[str, Any]) -> tuple[tuple[str, Scheme], ...]:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    if raw.get("transform_config"):
        raise _unsupported("transforms of weights (transform_config)")
    if (raw.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _unsupported("sparse weights (sparsity_config)")
    parsed = QuantizationConfig.model_validate(dict(raw))
    if str(parsed.quantization_status.value) not in ("compressed", "frozen", "initialized"):
        raise _unsupported(f"the status {parsed.quantization_status.value}")
    rules: list[tuple[str, Scheme]] = []
    for group in parsed.config_groups.values():
        assert isinstance(group, QuantizationScheme)
        if group.weights is None:
            continue
        stored = group.format or parsed.format
        scheme = _of_arguments(str(getattr(stored, "value", stored)), group.weights)
        for target in group.targets:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
            rules.append((target, scheme))
    # A target that matches a layer name has precedence over one that matches a class.
    return tuple(sorted(rules, key=lambda rule: _is_class(rule[0])))


def _of_arguments(stored: str, weights: Any) -> Scheme:
    """Return the scheme for one group of layers, from `QuantizationArgs`."""
    bits, is_float = int(weights.num_bits), str(weights.type) == "float"
    block = _block(weights.block_structure)
    group_size = weights.group_size if isinstance(weights.group_size, int) and weights.group_size > 0 else 0
    has_zero_points = not weights.symmetric
    if stored == "pack-quantized" and bits in (4, 8) and not is_float:
        has_order = getattr(weights.actorder, "value", weights.actorder) == "group"
        return Scheme(
            layout=Layout.PACKED,
            bits=bits,
            group_size=group_size,
            has_zero_points=has_zero_points,
            has_order=has_order,
        )
    if stored in ("int-quantized", "float-quantized", "naive-quantized") and bits == 8:
        return Scheme(layout=Layout.PLAIN, bits=8, group_size=group_size, block=block, has_zero_points=has_zero_points)
    if stored in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") and bits == 4 and is_float:
        size = group_size or (16 if stored.startswith("nvfp4") else 32)
        return Scheme(layout=Layout.FP4, bits=4, group_size=size)
    raise _unsupported(f"the format {stored} with {bits} bits ({'float' if is_float else 'int'})")


def _gptq(raw: Mapping[str, Any]) -> tuple[tuple[str, Scheme], ...]:
    form = str(raw.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported(f"the GPTQ format {form}")
    if raw.get("dynamic"):
        raise _unsupported("options per layer (dynamic)")
    scheme = Scheme(
        layout=Layout.GPTQ,
        bits=_four_or_eight(raw["bits"]),
        group_size=max(0, int(raw.get("group_size", 128))),
        has_order=bool(raw.get("desc_act")),
        zeros_stored_less_one=form == "gptq",
    )
    return (("", scheme),)


def _awq(raw: Mapping[str, Any]) -> tuple[tuple[str, Scheme], ...]:
    version = str(raw.get("version", "gemm")).lower()
    if version != "gemm":
        raise _unsupported(f"the AWQ version {version}")
    bits = int(raw.get("bits", raw.get("w_bit", 4)))
    if bits != 4:
        raise _unsupported(f"AWQ with {bits} bits")
    size = int(raw.get("group_size", raw.get("q_group_size", 128)))
    return (("", Scheme(layout=Layout.AWQ, bits=4, group_size=max(0, size))),)


def _fp8(raw: Mapping[str, Any]) -> tuple[tuple[str, Scheme], ...]:
    if str(raw.get("fmt", "e4m3")) != "e4m3":
        raise _unsupported(f"FP8 in {raw['fmt']}")
    return (("", Scheme(layout=Layout.PLAIN, bits=8, block=_block(raw.get("weight_block_size")))),)


def _mxfp4(raw: Mapping[str, Any]) -> tuple[tuple[str, Scheme], ...]:
    return (("", Scheme(layout=Layout.FP4, bits=4, group_size=32)),)


def _modelopt(raw: Mapping[str, Any]) -> tuple[tuple[str, Scheme], ...]:
    algorithm = str(raw["quant_algo"])
    if algorithm == "NVFP4":
        return (("", Scheme(layout=Layout.FP4, bits=4, group_size=int(raw.get("group_size") or 16))),)
    if algorithm == "FP8":
        return (("", Scheme(layout=Layout.PLAIN, bits=8)),)
    raise _unsupported(f"the ModelOpt algorithm {algorithm}")


_READERS = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
}


def _block(size: Any) -> tuple[int, int] | None:
    """Return the outputs and inputs of a block; None if there are no blocks.

    Raises:
        ValueError: these are not two positive numbers.
    """
    if not size:
        return None
    high, wide = map(int, size)
    if high <= 0 or wide <= 0:
        raise ValueError(f"a block of {high} x {wide} weights is not possible")
    return high, wide


def _four_or_eight(bits: object) -> int:
    if bits not in (4, 8):
        raise _unsupported(f"GPTQ with {bits} bits")
    return int(str(bits))


def _matches(layer: str, target: str) -> bool:
    """Return whether a target of compressed-tensors matches a layer; an empty target or a class matches all."""
    if not target or _is_class(target):
        return True
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), layer) is not None
    return layer == target or layer.endswith(f".{target}")


def _is_class(target: str) -> bool:
    """Return whether a target is the name of a class, such as "Linear"."""
    return not target.startswith("re:") and target[:1].isupper() and "." not in target


def _unsupported(what: str) -> ConfigError:
    return ConfigError(
        f"model: quantization_config of config.json has {what}, which is not supported; use int8, 4-bit or e4m3 weights"
        " in the layout of compressed-tensors, GPTQ, AWQ, FP8, MXFP4 or ModelOpt, or an unquantised checkpoint"
        " with --quantization"
    )


def _what(error: Exception) -> str:
    """Return what is wrong in one line."""
    if isinstance(error, KeyError):
        return f"the field {error.args[0]} is missing"
    errors = getattr(error, "errors", None)  # of pydantic, which compressed-tensors uses
    if callable(errors) and (found := errors()):
        field, text = ".".join(map(str, found[0]["loc"])), str(found[0]["msg"])
        return f"{field}: {text.splitlines()[0]}" if field else text.splitlines()[0]
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
