"""Tiny random checkpoints of many architectures, complete enough to be served end to end.

`make_checkpoint` writes config.json, model.safetensors and a byte-level tokenizer with a chat template. Weights are
drawn wide, so that logits are far apart and greedy tokens are a sharp oracle; the same seed gives the same files.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 384
MAX_POSITIONS = 1024
SLIDING_WINDOW = 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = _SIZES | {"num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = _GROUPED | {
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
_RECURRENT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""Models without attention have no position limit; the field provides `max_model_len`."""
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_SHARING: dict[str, Any] = _GROUPED | {
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "head_dim": 16,
    "sliding_window": SLIDING_WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "tie_word_embeddings": False,
    "final_logit_softcapping": 30.0,
}
"""The last layers use the keys and values of earlier layers."""

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", _GROUPED),
    "MistralForCausalLM": ("MistralConfig", _GROUPED | {"sliding_window": SLIDING_WINDOW}),
    "Qwen2ForCausalLM": ("Qwen2Config", _GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", _GROUPED | {"head_dim": 32, "tie_word_embeddings": True}),
    "MinistralForCausalLM": ("MinistralConfig", _GROUPED | {"head_dim": 32, "sliding_window": SLIDING_WINDOW}),
    "MixtralForCausalLM": ("MixtralConfig", _GROUPED | {"num_local_experts": 4, "sliding_window": SLIDING_WINDOW}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", _EXPERTS | {"shared_expert_intermediate_size": 80}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        _GROUPED
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": False,
            "sliding_window": SLIDING_WINDOW,
            "num_hidden_layers": 3,
            "layer_types": _LAYER_TYPES,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        _GROUPED
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": False,
            "sliding_window": SLIDING_WINDOW,
            "num_hidden_layers": 3,
            "layer_types": _LAYER_TYPES,
        },
    ),
    "Gemma3nForCausalLM": (
        "Gemma3nTextConfig",
        _SHARING | {"laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0] * 2, "hidden_size_per_layer_input": 8},
    ),
    "Gemma4ForCausalLM": (
        "Gemma4TextConfig",
        _SHARING
        | {
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "use_double_wide_mlp": True,
        }
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
        | {"hidden_size_per_layer_input": 8},
    ),
    "GptOssForCausalLM": (
        "GptOssConfig",
        _GROUPED
        | {
            "head_dim": 32,
            "sliding_window": SLIDING_WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "Phi3ForCausalLM": ("Phi3Config", _GROUPED | {"sliding_window": None}),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": MAX_POSITIONS,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _SIZES),
    "FalconForCausalLM": ("FalconConfig", _SIZES | {"ffn_hidden_size": 128}),
    "GPTJForCausalLM": (
        "GPTJConfig",
        {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}
        | {"rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "MptForCausalLM": (
        "MptConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": MAX_POSITIONS}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "BartForCausalLM": (
        "BartConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
        | {"decoder_ffn_dim": 128, "max_position_embeddings": MAX_POSITIONS, "is_decoder": True}
        | {"is_encoder_decoder": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        _SIZES
        | {"q_lora_rank": 24, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        _GROUPED
        | {"head_dim": 16, "intermediate_size_mlp": 128, "num_local_experts": 2, "attention_chunk_size": 24}
        | {"num_hidden_layers": 3, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    ),
    "Lfm2ForCausalLM": ("Lfm2Config", _GROUPED | {"layer_types": ["conv", "full_attention"]}),
    "Qwen3NextForCausalLM": (
        "Qwen3NextConfig",
        _GROUPED
        | {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"shared_expert_intermediate_size": 48, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "FalconH1ForCausalLM": (
        "FalconH1Config",
        _GROUPED
        | {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
        | {"mamba_chunk_size": 32},
    ),
    "Mamba2ForCausalLM": (
        "Mamba2Config",
        _RECURRENT | {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 32},
    ),
    "MambaForCausalLM": ("MambaConfig", _RECURRENT | {"state_size": 8}),
}

ARCHITECTURES = tuple(_CONFIGS)
"""Class names that `make_checkpoint` knows."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL_TOKENS = ["<|pad|>", "<|start|>", "<|stop|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
_CORPUS = ["the quick brown fox jumps over the lazy dog and the other one sings in the rain, one two three"] * 4


def make_checkpoint(architecture: str, folder: Path, *, seed: int = 0, std: float = 0.2, **changes: Any) -> Path:
    """Write a tiny random fp32 checkpoint into `folder`.

    Args:
        architecture: one of `ARCHITECTURES`.
        folder: made if it does not exist.
        seed: same seed, same weights.
        std: standard deviation of the weights.
        changes: fields of the configuration to set differently.

    Returns:
        The folder.
    """
    config_class, sizes = _CONFIGS[architecture]
    config = getattr(transformers, config_class)(**(sizes | changes))
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, architecture)(config)
    draw_weights(model, std, seed)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of `VOCAB_SIZE` tokens that knows every byte, a few merges and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|start|>",
        eos_token="<|stop|>",
        chat_template=_CHAT_TEMPLATE,
    )


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json of a checkpoint in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@torch.no_grad()
def draw_weights(model: PreTrainedModel, std: float, seed: int) -> None:
    """Sample normal matrices and biases. Norms are near but not at their neutral value, so that each matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1 or name.endswith(("bias", "sinks")):
            weight.copy_(noise * std)
        else:
            weight.add_(noise * 0.1)
