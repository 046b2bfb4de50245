"""Reader of GGUF files (llama.cpp), through the package `gguf`.

Tensors get the names and the order of rows of the original Hugging Face checkpoint. A matrix in a type for which the
CPU kernels have a layout (`kernels.gguf`) is a `GgufWeight` with the bytes of the file; all others are dequantised.
config.json and tokenizer.json of the model must be in the same folder: the metadata of the file is not used.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from kernels.gguf import BLOCK_BYTES
from shared.config import ConfigError
from worker_svc.model.quantised import GgufWeight

SUFFIX = ".gguf"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Names of model families in GGUF files; `llama` includes Mistral."""
_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IGNORED = ("rope_freqs.weight",)
"""Tensors that config.json describes."""


def find(folder: Path) -> Path | None:
    """Return a folder's GGUF file; None if it has none.

    Raises:
        ConfigError: the folder has several.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise ConfigError(
            f"model: {folder} has {len(files)} GGUF files; "
            "remove all except the one to serve (split files are not supported)"
        )
    return files[0] if files else None


def read_tensors(
    file: Path, folder: Path, only: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor | GgufWeight]]:
    """Yield the Hugging Face name and the value of each tensor; only those in `only`, if given.

    Raises:
        ConfigError: the file is damaged, or has an architecture, tensor or type that is not supported.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    try:
        reader = GGUFReader(file, "c")  # PyTorch warns about tensors over memory that cannot be written
        family = str(reader.fields["general.architecture"].contents())
    except Exception:  # The reader raises many types of errors, with texts about its own arrays.
        raise ConfigError(f"model: {file} is damaged or incomplete; download the file again") from None
    if family not in _ARCHITECTURES:
        raise ConfigError(
            f"model: GGUF files of the family {family} are not supported; use one of {', '.join(_ARCHITECTURES)}, or"
            " safetensors weights"
        )
    heads = _heads(folder) if family == "llama" else {}
    for tensor in reader.tensors:
        if tensor.name in _IGNORED:
            continue
        name = _name(tensor.name, file)
        if only is not None and name not in only:
            continue
        if tensor.tensor_type.name not in _TYPES:
            raise ConfigError(
                f"model: {tensor.name} in {file} has the type {tensor.tensor_type.name}, which is not supported; use"
                f" a file with {', '.join(_TYPES)}"
            )
        kind, projection = tensor.tensor_type.name, name.split(".")[-2]
        as_stored = kind in BLOCK_BYTES and tensor.data.ndim == 2
        if as_stored:
            value = torch.from_numpy(tensor.data).view(len(tensor.data), -1, BLOCK_BYTES[kind])
        else:
            value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if projection in heads:
            value = _in_order(value, heads[projection])
        yield name, GgufWeight(kind, value) if as_stored else value


def _name(name: str, file: Path) -> str:
    """Return the Hugging Face name of a tensor."""
    *block, part, kind = name.split(".")
    known = _NAMES.get(part)
    if known is None or (block and (len(block) != 2 or block[0] != "blk")):
        raise ConfigError(f"model: {file} has an unknown tensor {name}; use safetensors weights")
    return f"model.layers.{block[1]}.{known}.{kind}" if block else f"{known}.{kind}"


def _heads(folder: Path) -> dict[str, int]:
    """Return the numbers of query and key heads, by the projection."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    heads = int(config["num_attention_heads"])
    return {"q_proj": heads, "k_proj": int(config.get("num_key_value_heads") or heads)}


def _in_order(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Convert rows from llama.cpp's order, which rotates neighbouring rows instead of rows half a head apart."""
    pairs = value.view(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)
