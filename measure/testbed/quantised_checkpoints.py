"""Tiny checkpoints in the layouts of quantised checkpoints, each with the same checkpoint with dequantised weights.

The compressed-tensors library writes its own layouts. GPTQ and AWQ are written here, following the formats of AutoGPTQ
and AutoAWQ. `gguf` writes and reads GGUF files. Its Q4_K, Q5_K and Q6_K blocks are random bytes, because every byte
sequence is valid.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kernels.linear import dequantised, quantise_int4
from kernels.native.serving import native
from measure.testbed.checkpoints import edit_config, make_checkpoint

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "std": 0.12}
"""Groups of 128 inputs fit."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A quantised checkpoint, and the same model with its dequantised weights in float32."""

    quantised: Path
    plain: Path


def make_pair(
    layout: str, folder: Path, architecture: str = "LlamaForCausalLM", *, only: str = ".layers.", **changes: Any
) -> Pair:
    """Write both checkpoints for one layout in `LAYOUTS` into `folder`."""
    base = make_checkpoint(architecture, folder / "base", **(SIZES | changes))
    return convert_checkpoint(base, folder, layout, only=only)


def convert_checkpoint(base: Path, folder: Path, layout: str, *, only: str = ".layers.") -> Pair:
    """Write both checkpoints of a layout into `folder`, from an unquantised one.

    Matrices whose names contain `only` are quantised.
    """
    convert, config = LAYOUTS[layout]
    tensors: Tensors = {}
    plain: Tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.dim() == 2 and only in name:
            stored, weights = convert(weight)
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in stored.items()}
            plain[name] = weights
        else:
            tensors[name] = plain[name] = weight
    return _write_pair(base, folder, tensors, plain, config)


def _write_pair(base: Path, folder: Path, tensors: Tensors, plain: Tensors, config: Mapping[str, Any]) -> Pair:
    pair = Pair(folder / "quantised", folder / "plain")
    for target, content in ((pair.quantised, tensors), (pair.plain, plain)):
        shutil.copytree(base, target)
        save_file(content, target / "model.safetensors", {"format": "pt"})
    edit_config(pair.quantised, lambda values: values.update(quantization_config=dict(config)))
    return pair


def _split(x: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    """Return the tensor with one dimension split into several."""
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def rounds_activations(model: PreTrainedModel, *, ranks: int = 1, head: bool = False) -> PreTrainedModel:
    """Make a decoder's linear layers round their inputs like the kernels' int8 and int4 products.

    With several ranks, each rank rounds its own inputs with a separate scale. With `head`, the LM head rounds its
    inputs too.
    """
    for module, parts in _products(model, ranks, head=head):
        module.register_forward_pre_hook(lambda _, inputs, parts=parts: (_rounded(inputs[0], parts),))
    return model


def rounds_weights(model: PreTrainedModel, kind: str, *, ranks: int = 1) -> PreTrainedModel:
    """Make a decoder compute with the weights that `--quantization` stands for: "int8" or "int4".

    Among several ranks each quantises the weights that it has. The LM head has int8 weights.
    """
    kernels = native()
    assert kernels is not None
    in_layers = {id(module) for module, _ in _products(model, ranks, head=False)}
    for module, parts in _products(model, ranks, head=True):
        if kind == "int4" and id(module) in in_layers:
            weights = [
                dequantised(quantise_int4(part.contiguous(), kernels=kernels)) for part in module.weight.chunk(parts, 1)
            ]
            module.weight.data = torch.cat(weights, 1)
        else:
            module.weight.data = _rounded(module.weight.data, parts)
    return rounds_activations(model, ranks=ranks, head=True)


def _products(model: PreTrainedModel, ranks: int, *, head: bool) -> Iterator[tuple[torch.nn.Linear, int]]:
    """Yield each quantised linear layer, with the number of parts into which the ranks divide its inputs."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (".layers." in name or (head and name == "lm_head")):
            yield module, ranks if name.endswith(("o_proj", "down_proj")) else 1


def _rounded(x: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a tensor in eight bits, with a scale for each of `parts` parts of the last dimension."""
    pieces = _split(x, x.dim() - 1, parts, -1)
    scale = pieces.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (pieces / scale).round() * scale, pieces).flatten(-2)


def _ranges(weight: torch.Tensor, group: int, bits: int, symmetric: bool, dtype: torch.dtype) -> tuple[Any, Any]:
    """Scales and zero points `[outputs, groups]`, of unsigned codes; the scales are rounded to `dtype`."""
    groups = _split(weight, 1, -1, group)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    most = (1 << bits) - 1
    if symmetric:
        scales = (torch.maximum(-low, high) * 2 / most).to(dtype).float()
        return scales, torch.full_like(scales, 1 << (bits - 1))
    scales = ((high - low) / most).to(dtype).float()
    return scales, (-low / scales).round().clamp(0, most)


def _codes(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    group = weight.shape[1] // scales.shape[1]
    spread = [x.repeat_interleave(group, 1) for x in (scales, zeros)]
    return (weight / spread[0] + spread[1]).round().clamp(0, (1 << bits) - 1)


def _back(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    group = codes.shape[1] // scales.shape[1]
    return (codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes `[rows, n]` packed into int32 along the second dimension, the first code lowest."""
    each = 32 // bits
    fields = _split(codes.long(), 1, -1, each) << (torch.arange(each) * bits)
    return fields.sum(2).to(torch.uint32).view(torch.int32)


def _gptq(bits: int, group: int, *, symmetric: bool, order: bool, less_one: bool) -> Callable[[torch.Tensor], Any]:
    def convert(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        size = group if group > 0 else inputs
        # With `desc_act`, the inputs of a group may come from anywhere.
        shuffled = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if order else torch.arange(inputs)
        scales, zeros = _ranges(weight[:, shuffled], size, bits, symmetric, torch.float16)
        codes = _codes(weight[:, shuffled], scales, zeros, bits)
        restored = torch.argsort(shuffled)
        stored = {
            "qweight": _words(codes[:, restored], bits).t(),
            "qzeros": _words((zeros.t() - int(less_one)) % (1 << bits), bits),
            "scales": scales.t().half(),
            "g_idx": (restored // size).int(),
            "bias": torch.zeros(weight.shape[0]),  # AutoGPTQ adds them
        }
        return stored, _back(codes, scales, zeros)[:, restored]

    return convert


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales, zeros = _ranges(weight, 128, 4, False, torch.float16)
    codes = _codes(weight, scales, zeros, 4)

    def interleaved(values: torch.Tensor) -> torch.Tensor:
        return _words(_split(values, 1, -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    stored = {"qweight": interleaved(codes.t()), "qzeros": interleaved(zeros.t()), "scales": scales.t().half()}
    return stored, _back(codes, scales, zeros)


def _fp8(block: tuple[int, int] | None) -> Callable[[torch.Tensor], Any]:
    """Return the layout of FP8 checkpoints that need no library, with one scale per block or per tensor."""

    def convert(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        high, wide = block or weight.shape
        padded = torch.nn.functional.pad(weight, (0, -inputs % wide, 0, -outputs % high))  # blocks at the edges
        blocks = _split(_split(padded, 1, -1, wide), 0, -1, high)
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / scales).to(torch.float8_e4m3fn)
        restored = (codes.float() * scales).flatten(2).flatten(0, 1)[:outputs, :inputs]
        parts = scales[:, 0, :, 0]
        stored = {"weight": codes.flatten(2).flatten(0, 1)[:outputs, :inputs]}
        stored |= {"weight_scale_inv": parts} if block else {"weight_scale": parts[0, 0], "input_scale": torch.ones(())}
        return stored, restored

    return convert


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _e2m1(weight: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest e2m1 codes in pairs, `[..., inputs / 2]` uint8, and their values, without `steps`.

    Args:
        weight: `[..., inputs]`.
        steps: as `weight`; a weight is a value times its step.
    """
    scaled = torch.where(steps > 0, weight / steps, 0)
    places = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
    codes = (places + 8 * (scaled < 0)).byte()
    return codes[..., 0::2] | codes[..., 1::2] << 4, _E2M1[places] * scaled.sign()


def _nvfp4(*, modelopt: bool) -> Callable[[torch.Tensor], Any]:
    """Return the layout of NVFP4: scales in e4m3 for 16 inputs, and a global scale."""

    def convert(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        highest = _split(weight, 1, -1, 16).abs().amax(2)
        factor = weight.abs().max() / (6 * 448)
        scales = (highest / 6 / factor).to(torch.float8_e4m3fn)
        steps = (scales.float() * factor).repeat_interleave(16, 1)
        codes, values = _e2m1(weight, steps)
        if modelopt:
            stored = {"weight": codes, "weight_scale_2": factor, "input_scale": torch.ones(())}
        else:
            stored = {"weight_packed": codes, "weight_global_scale": 1 / factor[None]}
        return stored | {"weight_scale": scales}, values * steps

    return convert


def _powers(weight: torch.Tensor) -> torch.Tensor:
    """Return the exponents of MXFP4's scales for 32 inputs, `[..., inputs / 32]` uint8 with a bias of 127."""
    highest = _split(weight, weight.dim() - 1, -1, 32).abs().amax(-1)
    return (highest.log2().floor() - 2 + 127).clamp(1, 254).byte()


def _mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    powers = _powers(weight)
    steps = torch.exp2(powers.float() - 127).repeat_interleave(32, -1)
    codes, values = _e2m1(weight, steps)
    return {"weight_packed": codes, "weight_scale": powers}, values * steps


def make_mxfp4(folder: Path, **changes: Any) -> Pair:
    """Write random weights of a gpt-oss as it is published: the experts of a layer in MXFP4, in one tensor."""
    base = make_checkpoint("GptOssForCausalLM", folder / "base", **changes)
    tensors: Tensors = {}
    plain: Tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = plain[name] = weight
            continue
        stored, weights = _mxfp4(weight.transpose(1, 2))
        codes, powers = stored["weight_packed"], stored["weight_scale"]
        tensors[f"{name}_blocks"] = codes.view(*powers.shape, 16)
        tensors[f"{name}_scales"] = powers
        plain[name] = weights.transpose(1, 2).contiguous()
    return _write_pair(base, folder, tensors, plain, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def _by_library(form: str, weights: Mapping[str, Any], dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
    """Return a layout of compressed-tensors, compressed and decompressed by its library."""

    def convert(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        strategy, size = weights["strategy"], weights.get("group_size") or weight.shape[1]
        if strategy == "block":
            parts = _split(_split(weight, 1, -1, 64), 0, -1, 64).transpose(1, 2).flatten(2)
        else:
            parts = _split(weight, 1, -1, size) if strategy != "tensor" else weight.flatten()[None, None]
        scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), scheme.weights)
        scales = scales.to(dtype)
        if strategy == "tensor":
            scales, zeros = scales.flatten(), zeros.flatten()
        compressor = BaseCompressor.get_value_from_registry(form)
        state = {"weight": weight, "weight_scale": scales.float()}
        if not weights.get("symmetric", True):
            state["weight_zero_point"] = zeros
        compressed = compressor.compress(state, scheme)
        restored = compressor.decompress(dict(compressed), scheme)["weight"]
        return compressed | {"weight_scale": scales}, restored.float()

    return convert


def _config(form: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
    }


def _library_layout(
    form: str, dtype: torch.dtype = torch.bfloat16, **weights: Any
) -> tuple[Callable[[torch.Tensor], Any], dict[str, Any]]:
    return _by_library(form, weights, dtype), _config(form, weights)


def _gptq_layout(
    bits: int, group: int, *, symmetric: bool, order: bool = False, form: str = "gptq"
) -> tuple[Callable[[torch.Tensor], Any], dict[str, Any]]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": order}
    convert = _gptq(bits, group, symmetric=symmetric, order=order, less_one=form == "gptq")
    return convert, config | {"checkpoint_format": form}


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "ct-int8-channel": _library_layout("int-quantized", num_bits=8, strategy="channel"),
    "ct-int8-tensor": _library_layout("int-quantized", num_bits=8, strategy="tensor"),
    "ct-int8-packed": _library_layout("pack-quantized", num_bits=8, strategy="channel"),
    "ct-int8-grouped": _library_layout("pack-quantized", num_bits=8, strategy="group", group_size=32),
    "ct-int4": _library_layout("pack-quantized", num_bits=4, strategy="group", group_size=128),
    "ct-int4-zeros": _library_layout("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
    "ct-int4-fp16": _library_layout("pack-quantized", torch.float16, num_bits=4, strategy="group", group_size=64),
    "ct-int4-small": _library_layout("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct-fp8-channel": _library_layout("float-quantized", torch.float32, num_bits=8, type="float", strategy="channel"),
    "ct-fp8-tensor": _library_layout("float-quantized", torch.float32, num_bits=8, type="float", strategy="tensor"),
    "ct-fp8-block": _library_layout(
        "float-quantized", torch.float32, num_bits=8, type="float", strategy="block", block_structure=[64, 64]
    ),
    "gptq-int4": _gptq_layout(4, 128, symmetric=True),
    "gptq-int4-zeros": _gptq_layout(4, 64, symmetric=False, form="gptq_v2"),
    "gptq-int4-order": _gptq_layout(4, 32, symmetric=False, order=True),
    "gptq-int8": _gptq_layout(8, -1, symmetric=True),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}),
    "fp8-block": (_fp8((64, 32)), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 32]}),
    "fp8-block-128": (_fp8((128, 128)), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "fp8-tensor": (_fp8(None), {"quant_method": "fp8", "activation_scheme": "static"}),
    "ct-nvfp4": (
        _nvfp4(modelopt=False),
        _config(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
    ),
    "ct-mxfp4": (
        _mxfp4,
        _config("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ),
    "modelopt-nvfp4": (
        _nvfp4(modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    ),
}
"""Functions from a weight to its stored tensors and its dequantised weight, and the `quantization_config`, by name."""

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_gguf(kind: str, folder: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> Pair:
    """Write random weights as a GGUF file with matrices of a type, such as "Q4_K", or of a mixture, "Q4_K_M"."""
    sizes = {"hidden_size": 256, "intermediate_size": 256} | changes
    return convert_to_gguf(make_checkpoint(architecture, folder / "base", **sizes), folder, kind)


def convert_to_gguf(base: Path, folder: Path, kind: str) -> Pair:
    """Write two checkpoints into `folder`: a GGUF file with its config.json, and the same weights dequantised."""
    config = json.loads((base / "config.json").read_text())
    (architecture,) = config["architectures"]
    family = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"}.get(architecture, config["model_type"])
    pair = Pair(folder / "quantised", folder / "plain")
    for target in (pair.quantised, pair.plain):
        shutil.copytree(base, target)
    (pair.quantised / "model.safetensors").unlink()
    writer = gguf.GGUFWriter(pair.quantised / "model.gguf", family)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    plain: Tensors = {}
    drawn = np.random.default_rng(0)
    for name, weight in load_file(base / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        *_, projection = module.split(".")
        known = module
        prefix = ""
        if ".layers." in module:
            _, _, index, *rest = module.split(".")
            known, prefix = ".".join(rest), f"blk.{index}."
        count = heads.get(projection, 0) if family == "llama" else 0
        placed = weight if not count else _split(weight, 0, count, 2, -1).transpose(1, 2).flatten(0, 2)
        key = f"{prefix}{_GGUF_NAMES[known]}.{part}"
        placed = placed.float()
        if weight.dim() < 2:
            writer.add_tensor(key, placed.numpy())
            plain[name] = weight
            continue
        own = kind.removesuffix("_M")
        if own != kind and projection in ("v_proj", "down_proj", "lm_head"):
            own = "Q6_K"
        number_type = gguf.GGMLQuantizationType[own]
        data = gguf_blocks(own, placed.numpy(), drawn)
        writer.add_tensor(key, data, raw_dtype=number_type)
        back = torch.from_numpy(gguf.quants.dequantize(data, number_type).copy())
        plain[name] = back if not count else _split(back, 0, count, -1, 2).transpose(1, 2).flatten(0, 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(
        {name: tensor.contiguous() for name, tensor in plain.items()},
        pair.plain / "model.safetensors",
        {"format": "pt"},
    )
    return pair


def gguf_blocks(kind: str, weight: Any, drawn: np.random.Generator) -> Any:
    """Return a matrix as bytes.

    For K-quants, return random blocks of 256 weights with about the same size as random weights.
    """
    if kind not in ("Q4_K", "Q5_K", "Q6_K"):
        return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = drawn.integers(0, 256, (weight.size // 256, size), dtype=np.uint8)
    # The scales of a block: two in front (Q4_K and Q5_K: steps and offsets) or one at the end (Q6_K).
    scales = drawn.uniform(0.5, 1.0, (len(blocks), 2)).astype(np.float16)
    if kind != "Q6_K":
        step = 0.0006 if kind == "Q4_K" else 0.0003
        blocks[:, :4] = (scales * np.array([step, 0.004], np.float16)).view(np.uint8)
    else:
        blocks[:, -2:] = (scales[:, :1] * np.float16(0.0001)).view(np.uint8)
    return blocks.reshape(weight.shape[0], -1)
