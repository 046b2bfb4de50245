"""A tiny checkpoint that always says the same, whatever its prompt contains.

Each token has one successor: the embedding of a token is a unit vector, attention and MLP add nothing, and the head
maps a token to its successor. The chat template begins the recital at the end of the prompt. It knows tools, in the
form of the family `hermes`.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|assistant|>"]
_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_reciting_model(folder: Path, says: Sequence[str], *, max_model_len: int = 1 << 17) -> Path:
    """Write a checkpoint that says these different pieces of text, one token each, and return its folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in says])
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | {"chat_template": _TEMPLATE}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": size,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": size // 64, "num_key_value_heads": 1,
        "head_dim": 64, "max_position_embeddings": max_model_len, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    head = torch.zeros(size, size)
    ids = [tokenizer.token_to_id(token) for token in ("<|assistant|>", *says, "<|eos|>")]
    for token, successor in pairwise(ids):
        head[successor, token] = 10.0
    sizes = {"q_proj": (size, size), "k_proj": (64, size), "v_proj": (64, size), "o_proj": (size, size)}
    weights = {f"self_attn.{name}.weight": torch.zeros(shape) for name, shape in sizes.items()}
    weights |= {f"mlp.{name}_proj.weight": torch.zeros(64, size) for name in ("gate", "up")}
    weights["mlp.down_proj.weight"] = torch.zeros(size, 64)
    weights |= {f"{name}_layernorm.weight": torch.ones(size) for name in ("input", "post_attention")}
    weights = {f"model.layers.0.{name}": weight for name, weight in weights.items()}
    weights |= {"model.norm.weight": torch.ones(size), "model.embed_tokens.weight": torch.eye(size)}
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
