"""Quantised weights of a checkpoint: one form for all layouts, read from the tensors that a `scheme` describes.

A weight is `(codes - zeros) * scales`, where a block of outputs and inputs shares a scale and a zero point. A weight
of a GGUF file has the bytes of the file, and one in e2m1 those of the checkpoint. If `kernels.linear` or
`kernels.gguf` has a matching layout, `StoredWeights` packs the codes and scales into it unchanged. All other weights
are dequantised.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from kernels import gguf
from kernels.linear import INT4_GROUP, PackedLinear, fits_int4, pack_int4, pack_int8
from kernels.weight_only import Scales, e2m1_values, scale_values
from shared.config import ConfigError
from shared.logging import get_logger
from worker_svc.model.scheme import Layout, Scheme

MAIN_PARTS = ("weight_packed", "qweight", "blocks")
"""Last parts of the names of tensors that hold the codes of a quantised layer, besides `weight`."""
SCALES = ("weight_scale", "weight_scale_inv")
"""Scales that are stored next to a `weight` in int8, e4m3 or e2m1."""
OTHER_PARTS = frozenset(
    {
        *SCALES,
        "weight_zero_point",
        "weight_global_scale",
        "weight_scale_2",
        "weight_shape",
        "weight_g_idx",
        "scales",
        "qzeros",
        "g_idx",
        # Static scales for activations and KV. Quire ignores them and computes scales from the current values.
        "input_scale",
        "input_zero_point",
        "input_scale_ub",
        "input_global_scale",
        "k_scale",
        "v_scale",
        "q_scale",
    }
)
"""Last parts of the names of all other tensors of a quantised layer."""
_E8M0_GROUP = 32
"""Inputs that share a scale in MXFP4."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of the eight outputs in an AWQ word."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """Weight `[outputs, inputs]` of a linear layer."""

    codes: torch.Tensor
    """`[outputs, inputs]` int8, uint8 or float8_e4m3fn."""
    scales: torch.Tensor
    """`[output blocks, groups]`, any float dtype."""
    zeros: torch.Tensor | None
    """As `scales`, int16; None: 0."""
    block: tuple[int, int]
    """Outputs and inputs that share a scale."""
    group_of: torch.Tensor | None = None
    """`[inputs]` int64: group of each input; None if the groups are consecutive."""

    @property
    def shape(self) -> torch.Size:
        """`[outputs, inputs]`."""
        return self.codes.shape

    def dequantised(self) -> torch.Tensor:
        """Return the weight in float32."""
        values = self.codes.float()
        if self.zeros is not None:
            values -= self._spread(self.zeros.float())
        return values * self._spread(self.scales.float())

    def narrow(self, dim: int, begin: int, length: int) -> "QuantisedWeight | None":
        """Return a range of outputs (`dim` 0) or inputs (1); None if it does not begin at a block boundary."""
        size = self.block[dim]
        if self.scales.shape[dim] > 1 and begin % size:
            return None
        if dim == 1 and self.group_of is not None:
            return replace(self, codes=self.codes[:, begin:][:, :length], group_of=self.group_of[begin:][:length])
        first, end = begin // size, -(-(begin + length) // size)

        def cut(x: torch.Tensor) -> torch.Tensor:
            return x.narrow(dim, first, end - first) if x.shape[dim] > 1 else x

        return replace(
            self,
            codes=self.codes.narrow(dim, begin, length),
            scales=cut(self.scales),
            zeros=None if self.zeros is None else cut(self.zeros),
        )

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat a value of each block for all of its weights."""
        outputs, inputs = self.shape
        high, wide = self.block
        rows = x.repeat_interleave(high, 0)[:outputs] if high > 1 else x
        if self.group_of is not None:
            return rows[:, self.group_of]
        return rows.repeat_interleave(wide, 1)[:, :inputs]


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """Weight `[outputs, inputs]` of a GGUF file."""

    kind: str
    """Type of its blocks, such as "Q4_K"."""
    blocks: torch.Tensor
    """`[outputs, blocks, bytes]` uint8."""

    @property
    def shape(self) -> torch.Size:
        """`[outputs, inputs]`."""
        return torch.Size((self.blocks.shape[0], self.blocks.shape[1] * gguf.block_inputs(self.kind)))

    def dequantised(self) -> torch.Tensor:
        """Return the weight in float32."""
        return gguf.dequantised(self.kind, self.blocks)

    def narrow(self, dim: int, begin: int, length: int) -> "GgufWeight | None":
        """Return a range of outputs (`dim` 0) or inputs (1); None if it is no range of whole blocks."""
        size = gguf.block_inputs(self.kind) if dim == 1 else 1
        if begin % size or length % size:
            return None
        return replace(self, blocks=self.blocks.narrow(dim, begin // size, length // size))


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """Weight `[outputs, inputs]` of a linear layer in e2m1, or those of all experts of a mixture.

    The tensors of experts have the expert as additional first dimension.
    """

    codes: torch.Tensor
    """`[outputs, inputs / 2]` uint8; the lower half is the first of two inputs."""
    scales: torch.Tensor
    """`[outputs, groups]` uint8."""
    scale_type: Scales
    """Meaning of the scales: e8m0 or e4m3."""
    factor: float = 1.0
    """Factor of all scales."""

    @property
    def shape(self) -> torch.Size:
        """`[outputs, inputs]`; with experts, `[experts, inputs, outputs]`, as an unquantised gpt-oss stores them."""
        *experts, outputs, half = self.codes.shape
        return torch.Size((*experts, 2 * half, outputs) if experts else (outputs, 2 * half))

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 2 * self.codes.shape[-1] // self.scales.shape[-1]

    def unpacked(self) -> torch.Tensor:
        """Return the codes of a matrix, one per byte, `[outputs, inputs]`."""
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)

    def dequantised(self) -> torch.Tensor:
        """Return the weight in float32, in the form of `shape`."""
        values = e2m1_values(self.unpacked())
        scales = scale_values(self.scales, self.scale_type).float() * self.factor
        weights = values * scales.repeat_interleave(self.group, -1)
        return weights.transpose(1, 2) if weights.dim() == 3 else weights

    def narrow(self, dim: int, begin: int, length: int) -> "Fp4Weight | None":
        """Return a range of a dimension of `shape`; None if it is no range of whole groups."""
        outputs_dim = self.codes.dim() - 2
        if self.codes.dim() == 3:
            dim = {0: 0, 1: 2, 2: 1}[dim]
        if dim <= outputs_dim:
            codes, scales = (x.narrow(dim, begin, length) for x in (self.codes, self.scales))
            return replace(self, codes=codes, scales=scales)
        if begin % self.group or length % self.group:
            return None
        codes = self.codes.narrow(dim, begin // 2, length // 2)
        return replace(self, codes=codes, scales=self.scales.narrow(dim, begin // self.group, length // self.group))

    def experts(self) -> "list[Fp4Weight]":
        """Return the matrix of each expert."""
        return [
            replace(self, codes=codes, scales=scales) for codes, scales in zip(self.codes, self.scales, strict=True)
        ]


StoredWeight = QuantisedWeight | GgufWeight | Fp4Weight


def read_weight(layer: str, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> StoredWeight:
    """Return the weight of a layer.

    Args:
        layer: name of the layer in the checkpoint.
        tensors: the tensors of the layer, by the last parts of their names.
        scheme: the quantisation that config.json specifies.

    Raises:
        ConfigError: a tensor is missing, or its shape does not match the others.
    """
    try:
        return _READERS[scheme.layout](tensors, scheme)
    except KeyError as error:
        raise ConfigError(
            f"model: the checkpoint lacks {layer}.{error.args[0]}, which its quantised weight needs; use a complete"
            " checkpoint"
        ) from None
    except (ValueError, RuntimeError, TypeError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(
            f"model: the quantised weight {layer} does not match quantization_config in config.json:"
            f" {str(error).splitlines()[0]}; use a checkpoint that matches config.json"
        ) from None


class StoredWeights:
    """Quantised weights that were not packed yet, by the rows of the matrices that they represent.

    A matrix of the model may concatenate the outputs of several layers of the checkpoint. The memory of such a matrix
    is allocated but not written, so the system commits no memory for it.
    """

    def __init__(self) -> None:
        self._weights: dict[int, tuple[str, StoredWeight]] = {}
        """Names and weights by the address of their first row."""
        self._addresses: list[int] = []
        self.num_packed = 0
        """Number of weights that were packed unchanged."""
        self.num_dequantised = 0
        """Number of weights that match no layout of the kernels."""

    def put(self, name: str, rows: torch.Tensor, weight: StoredWeight) -> None:
        """Store a weight of the checkpoint instead of writing it to `rows`, which are whole rows of a matrix.

        The weights of experts are stored one by one; their `rows` are `[experts, inputs, outputs]`.
        """
        if isinstance(weight, Fp4Weight) and len(weight.shape) == 3:
            for matrix, expert in zip(rows, weight.experts(), strict=True):
                self._weights[matrix.data_ptr()] = name, expert
        else:
            self._weights[rows.data_ptr()] = name, weight
        self._addresses.clear()

    def pack(self, matrix: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear | None:
        """Pack the weights of a matrix `[outputs, inputs]`, without its content.

        Returns: The packed weights. None if no layout represents them exactly; `matrix` then contains the dequantised
        weights.
        """
        parts = self._pop_all(matrix)
        rows = sum(part.shape[0] for part in parts.values())
        result = _packed(list(parts.values()), bias) if rows == matrix.shape[0] else None
        if result is not None:
            self.num_packed += len(parts)
            return result
        self._dequantise(parts, matrix)
        return None

    def take(self, matrix: torch.Tensor) -> list[StoredWeight] | None:
        """Remove and return the weights that make up a matrix `[outputs, inputs]`, in order; None if it has others."""
        if not self._weights:
            return None
        parts = self._pop_all(matrix)
        if parts and sum(part.shape[0] for part in parts.values()) == matrix.shape[0]:
            return list(parts.values())
        self._dequantise(parts, matrix)
        return None

    def fill(self, matrix: torch.Tensor) -> None:
        """Dequantise the weights of a matrix `[outputs, inputs]` into it, such as those of an embedding."""
        self._dequantise(self._pop_all(matrix), matrix)

    def check_empty(self) -> None:
        """Check that each weight was packed or dequantised; call this when the model is complete.

        Raises:
            ConfigError: the matrix of a weight was not filled.
        """
        if self._weights:
            names = sorted(name for name, _ in self._weights.values())
            raise ConfigError(
                f"model: {names[0]} is quantised in the checkpoint, which is not supported for this tensor"
                f" ({len(names)} in total); use a checkpoint in which it is not quantised"
            )

    def _dequantise(self, parts: Mapping[int, StoredWeight], matrix: torch.Tensor) -> None:
        self.num_dequantised += len(parts)
        for row, part in parts.items():
            matrix[row : row + part.shape[0]].copy_(part.dequantised())

    def _pop_all(self, matrix: torch.Tensor) -> dict[int, StoredWeight]:
        """Remove and return the weights of a matrix, by their first row, ascending."""
        if not self._addresses:
            self._addresses = sorted(self._weights)
        row_bytes = matrix.stride(0) * matrix.element_size()
        first, end = matrix.data_ptr(), matrix.data_ptr() + matrix.shape[0] * row_bytes
        found = self._addresses[bisect_left(self._addresses, first) : bisect_left(self._addresses, end)]
        return {(address - first) // row_bytes: self._weights.pop(address)[1] for address in found}


def log_form(*, num_packed: int, num_dequantised: int, dtype: torch.dtype) -> None:
    """Log the formats in which the quantised layers of a checkpoint are served."""
    if num_packed + num_dequantised:
        get_logger().info(
            "weights: layers of a quantised checkpoint are served as stored where the kernels have a layout for them,"
            " and dequantised otherwise",
            as_stored=num_packed,
            dequantised=num_dequantised,
            dtype=str(dtype).removeprefix("torch."),
        )


def _packed(weights: Sequence[StoredWeight], bias: torch.Tensor | None) -> PackedLinear | None:
    """Concatenate the outputs of `weights` in a layout of the CPU kernels with the same codes and scales.

    Returns:
        The weights; None if no layout of the kernels holds all parts exactly.
    """
    if any(isinstance(weight, Fp4Weight) for weight in weights):
        return None
    of_gguf = [weight for weight in weights if isinstance(weight, GgufWeight)]
    parts = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if of_gguf:
        return None if parts else _packed_gguf(of_gguf, bias)
    if all(map(_fits_int8, parts)):
        scales = [part.scales.float().flatten().repeat_interleave(part.block[0])[: part.shape[0]] for part in parts]
        return pack_int8(torch.cat([part.codes for part in parts]), torch.cat(scales), bias)
    grouped = [each for each in map(_in_groups, parts) if each is not None]
    if len(grouped) < len(parts):
        return None
    codes, group_scales, zeros = (torch.cat(each) for each in zip(*grouped, strict=True))
    return pack_int4(codes, group_scales, zeros, bias)


def _packed_gguf(weights: Sequence[GgufWeight], bias: torch.Tensor | None) -> PackedLinear:
    """Concatenate the outputs of weights of a GGUF file, whose types may differ."""
    parts, row = [], 0
    for kind, group in groupby(weights, key=lambda weight: weight.kind):
        blocks = [weight.blocks for weight in group]
        whole = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        parts.append(gguf.pack(kind, whole, None if bias is None else bias[row : row + len(whole)]))
        row += len(whole)
    return parts[0] if len(parts) == 1 else gguf.concatenated(parts)


def _fits_int8(part: QuantisedWeight) -> bool:
    """Return whether each output has one scale, and no zero point."""
    return (
        part.codes.dtype == torch.int8
        and part.scales.shape[1] == 1
        and (part.zeros is None or not bool(part.zeros.any()))
    )


def _in_groups(part: QuantisedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return codes from 0 to 15, and scales and zero points of the kernels' groups; None if they do not fit."""
    outputs, inputs = part.shape
    high, wide = part.block
    if part.codes.dtype not in (torch.int8, torch.uint8) or part.group_of is not None:
        return None
    if part.scales.shape[1] > 1 and wide % INT4_GROUP:
        return None
    groups = -(-inputs // INT4_GROUP)
    repeats = groups if part.scales.shape[1] == 1 else wide // INT4_GROUP

    def of_groups(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(high, 0)[:outputs].repeat_interleave(repeats, 1)[:, :groups]

    scales = of_groups(part.scales.float())
    zeros = of_groups(torch.zeros_like(scales[:1, :1]).expand_as(part.scales) if part.zeros is None else part.zeros)
    # Convert symmetric codes from -8 to 7 to codes from 0 to 15 with zero point 8.
    shift = 8 if int(part.codes.min()) < 0 else 0
    codes, zeros = part.codes.short() + shift, zeros.float() + shift
    return (codes.byte(), scales, zeros) if fits_int4(codes, scales, zeros) else None


def _part(tensors: Mapping[str, torch.Tensor], name: str, is_needed: bool) -> torch.Tensor | None:
    """Return a part of a weight, or None if it is absent and not needed."""
    return tensors[name] if is_needed else tensors.get(name)


def _one_of(tensors: Mapping[str, torch.Tensor], *names: str) -> torch.Tensor:
    """Return the first of these tensors that the weight has."""
    for name in names:
        if name in tensors:
            return tensors[name]
    raise KeyError(" or ".join(names))


def _plain(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantisedWeight:
    codes = tensors["weight"]
    scales = _one_of(tensors, *SCALES)
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"its weight has the type {codes.dtype}, not int8 or e4m3")
    if scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    zeros = _part(tensors, "weight_zero_point", scheme.has_zero_points)
    if zeros is not None:
        zeros = zeros.reshape(scales.shape).short()
    return _consistent(codes, scales, zeros, scheme, None)


def _compressed(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantisedWeight:
    outputs, inputs = map(int, tensors["weight_shape"].flatten().tolist())
    scales, offset = tensors["weight_scale"], 1 << (scheme.bits - 1)
    codes = _fields(tensors["weight_packed"], scheme.bits)[:, :inputs].short() - offset
    if codes.shape != (outputs, inputs):
        raise ValueError(f"weight_packed holds {tuple(codes.shape)}, weight_shape says {(outputs, inputs)}")
    zeros = _part(tensors, "weight_zero_point", scheme.has_zero_points)
    if zeros is not None:
        if zeros.dtype == torch.int32:  # The zero points are packed along the outputs.
            zeros = _fields(zeros.t().contiguous(), scheme.bits).t()[:outputs].short() - offset
        zeros = zeros.reshape(scales.shape).short()
    return _consistent(codes.to(torch.int8), scales, zeros, scheme, _part(tensors, "weight_g_idx", scheme.has_order))


def _gptq(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantisedWeight:
    # [inputs / fields of a word, outputs] -> [outputs, inputs]
    codes = _fields(tensors["qweight"].t().contiguous(), scheme.bits)
    scales = tensors["scales"].t().contiguous()
    zeros = _fields(tensors["qzeros"], scheme.bits)[:, : codes.shape[0]].t().short() + scheme.zeros_stored_less_one
    if scheme.bits == 8:  # Use signed codes, so that symmetric weights have no zero points.
        codes, zeros = (codes.short() - 128).to(torch.int8), zeros - 128
    return _consistent(codes, scales, zeros.contiguous(), scheme, _part(tensors, "g_idx", scheme.has_order))


def _awq(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantisedWeight:
    # [inputs, outputs / 8] -> [outputs, inputs]
    codes, zeros = (
        _fields(tensors[name], 4).view(len(tensors[name]), -1, 8)[:, :, _AWQ_ORDER].flatten(1).t().contiguous()
        for name in ("qweight", "qzeros")
    )
    return _consistent(codes, tensors["scales"].t().contiguous(), zeros.short(), scheme, None)


def _fp4(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> StoredWeight:
    if "weight" in tensors and tensors["weight"].dtype != torch.uint8:
        return _plain(tensors, scheme)  # a layer in e4m3 among layers in e2m1
    if "blocks" in tensors:  # [experts, outputs, groups, bytes of a group]
        codes, scales = tensors["blocks"].flatten(2), tensors["scales"]
    else:
        codes = tensors["weight"] if "weight" in tensors else tensors["weight_packed"]
        scales = tensors["weight_scale"]
    if codes.dtype != torch.uint8 or scales.dtype not in (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        raise ValueError(f"codes and scales have the types {codes.dtype} and {scales.dtype}")
    if codes.dim() < 2 or scales.shape != (*codes.shape[:-1], 2 * codes.shape[-1] // scheme.group_size):
        raise ValueError(
            f"scales {tuple(scales.shape)} do not match codes {tuple(codes.shape)} in groups of {scheme.group_size}"
        )
    scale_type = Scales.E4M3 if scales.dtype == torch.float8_e4m3fn else Scales.E8M0
    factor = 1.0
    if scale_type is Scales.E4M3:
        inverse = "weight_scale_2" not in tensors
        whole = _one_of(tensors, "weight_scale_2", "weight_global_scale")
        if not whole.is_floating_point():
            raise ValueError(f"its global scale has the type {whole.dtype}, which is not a floating-point type")
        if not float(whole):
            raise ValueError("its global scale is 0")
        factor = 1 / float(whole) if inverse else float(whole)
    elif scheme.group_size != _E8M0_GROUP:
        raise ValueError(f"scales in e8m0 for groups of {scheme.group_size}, not {_E8M0_GROUP}")
    scales = scales.view(torch.uint8)
    # The codes for NaN are 255 in e8m0, and 127 with any sign in e4m3.
    not_finite = scales == 255 if scale_type is Scales.E8M0 else scales & 127 == 127
    if bool(not_finite.any()) or not math.isfinite(factor):
        raise ValueError("a scale is not a finite number")
    return Fp4Weight(codes, scales, scale_type, factor)


_READERS: dict[Layout, Callable[[Mapping[str, torch.Tensor], Scheme], StoredWeight]] = {
    Layout.PLAIN: _plain,
    Layout.PACKED: _compressed,
    Layout.GPTQ: _gptq,
    Layout.AWQ: _awq,
    Layout.FP4: _fp4,
}


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Split int32 words `[rows, n]` into unsigned fields `[rows, n * 32 / bits]` uint8, the lowest bits first."""
    if words.dtype != torch.int32:
        raise ValueError(f"packed codes have the type {words.dtype}, not int32")
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), 2).flatten(1)


def _consistent(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    scheme: Scheme,
    group_of: torch.Tensor | None,
) -> QuantisedWeight:
    """Find the size of a block, and check the shapes.

    Raises:
        ValueError: the shapes do not match.
    """
    if codes.dim() != 2 or scales.dim() != 2 or not codes.numel() or not scales.numel():
        raise ValueError(f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} are not matrices")
    outputs, inputs = codes.shape
    rows, groups = scales.shape
    if not scales.is_floating_point():
        raise ValueError(f"scales have the type {scales.dtype}, which is not a floating-point type")
    if not bool(scales.float().isfinite().all()):
        raise ValueError("a scale is not a finite number")
    if scheme.block is None and not scheme.group_size and (groups > 1 or rows not in (1, outputs)):
        raise ValueError(
            f"scales {(rows, groups)} do not match a weight {(outputs, inputs)} with a scale per output or tensor"
        )
    high, wide = scheme.block or (-(-outputs // rows), scheme.group_size or -(-inputs // groups))
    if groups == 1 and (rows == 1 or scheme.block is None):
        wide = max(wide, inputs)
    if rows == 1 and (groups == 1 or scheme.block is None):
        high = max(high, outputs)
    if (rows, groups) != (-(-outputs // high), -(-inputs // wide)):
        raise ValueError(f"scales {(rows, groups)} do not match a weight {(outputs, inputs)} in blocks {(high, wide)}")
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zero points {tuple(zeros.shape)} do not match scales {(rows, groups)}")
    if group_of is not None:
        if group_of.shape != (inputs,) or int(group_of.max()) >= groups or int(group_of.min()) < 0:
            raise ValueError(f"the groups of the {inputs} inputs must be from 0 to {groups - 1}")
        group_of = group_of.long()
        if bool((group_of == torch.arange(inputs) // wide).all()):
            group_of = None
    return QuantisedWeight(codes, scales, zeros, (high, wide), group_of)
