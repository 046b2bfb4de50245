"""The models for all peers: random weights in the shape of a known model, and a tokenizer.

Random weights take as long as trained ones and need no download. All shapes have tied embeddings in bfloat16:

* `llama`: 335 M parameters: hidden 1,024, 24 layers, 16 query heads and 8 KV heads of 64, intermediate 3,072, 32,000
  tokens.
* `lfm2`: 354 M parameters, the sizes of LFM2-350M: 10 layers with short convolutions, 6 with attention.
* `granite-h`: 340 M parameters, the sizes of Granite-4-H-350M: 28 layers with Mamba 2, 4 with attention.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 32_000
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _INTERMEDIATE = 1024, 24, 16, 8, 64, 3072
_STD = 0.02
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": _STD,
    "torch_dtype": "bfloat16",
}
_SHARED = {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
_HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": _SHARED
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": 65_536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "granite-h": _SHARED
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100_352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_chunk_size": 256,
        "rms_norm_eps": 1e-5,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.246,
        "logits_scaling": 3.0,
        "position_embedding_type": "nope",
    },
}
"""config.json of each hybrid, with the field values of checkpoints on the hub, which the peers' converters expect."""
SHAPES = ("llama", *_HYBRIDS)


def make_model(folder: Path, seed: int = 0, shape: str = "llama") -> None:
    """Write the checkpoint of a shape unless it exists."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = _HYBRIDS.get(shape, _CONFIG)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(special) + "\n")
    _make_tokenizer(folder, seed)
    weights = _weights(seed) if shape == "llama" else _hybrid_weights(folder, seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _hybrid_weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights with which the class of a config.json begins, without the tied LM head."""
    torch.manual_seed(seed)
    maker: Any = AutoModelForCausalLM
    model = maker.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return {name: values.contiguous() for name, values in model.state_dict().items() if name != "lm_head.weight"}


def _weights(seed: int) -> dict[str, torch.Tensor]:
    """Return random linears `[out, in] bf16` and norms of ones `[hidden] bf16`, under the names used in checkpoints."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * _STD).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(_HIDDEN, dtype=torch.bfloat16)

    weights = {"model.embed_tokens.weight": normal(VOCAB_SIZE, _HIDDEN), "model.norm.weight": ones()}
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones(),
            f"{name}.self_attn.q_proj.weight": normal(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}.self_attn.k_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}.self_attn.v_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}.self_attn.o_proj.weight": normal(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{name}.post_attention_layernorm.weight": ones(),
            f"{name}.mlp.gate_proj.weight": normal(_INTERMEDIATE, _HIDDEN),
            f"{name}.mlp.up_proj.weight": normal(_INTERMEDIATE, _HIDDEN),
            f"{name}.mlp.down_proj.weight": normal(_HIDDEN, _INTERMEDIATE),
        }
    return weights


def _make_tokenizer(folder: Path, seed: int) -> None:
    """Train a byte-level BPE tokenizer on made-up words until it has `VOCAB_SIZE` entries."""
    rng = random.Random(seed)
    syllables = [a + b + c for a in "bcdfghjklmnprstvwz" for b in "aeiou" for c in ("", "l", "n", "r", "s")]
    words = ("".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(480_000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
