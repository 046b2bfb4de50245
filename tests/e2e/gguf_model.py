"""Writes the bundled model as GGUF, the form that llama.cpp reads: `PYTHON gguf_model.py FOLDER FILE`.

It runs in an environment with the package gguf, and needs nothing of Quire.
"""

import json
import sys
from pathlib import Path

import gguf
from safetensors.numpy import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of a layer's parts, here and there."""


def main(source: Path, target: Path) -> None:
    """Write sizes, tokenizer and weights."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(target), gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _tokenizer(writer, source, config)
    for name, tensor in load_file(source / "model.safetensors").items():
        writer.add_tensor(_renamed(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
    name = name.removeprefix("model.").removesuffix(".weight")
    if name.startswith("layers."):
        _, number, part = name.split(".", 2)
        return f"blk.{number}.{_NAMES[part]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[name] + ".weight"


def _tokenizer(writer: gguf.GGUFWriter, source: Path, config: dict[str, int]) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"] | {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for each in tokenizer["added_tokens"]:
        kinds[each["content"]] = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(list(kinds.values()))
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(json.loads((source / "tokenizer_config.json").read_text())["chat_template"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
