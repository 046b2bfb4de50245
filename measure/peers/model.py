"""The model for all peers: random weights in the shape of a small Llama, and a tokenizer of the right size.

Random weights take as long as trained ones and need no download. The model has 335 M parameters: hidden 1,024, 24
layers, 16 query heads and 8 KV heads of 64, intermediate 3,072, 32,000 tokens, embeddings tied, bfloat16.
"""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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


def make_model(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint unless it exists."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(special) + "\n")
    _make_tokenizer(folder, seed)
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})


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
