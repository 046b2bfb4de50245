"""Models without checkpoints: a configuration and a tokenizer of the right size; weights are generated on the device.

Random weights cost as much time as trained ones. The tokenizer names token i "t<i>", so that every id has a text.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder."""

    name: str
    architecture: str
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    positions: int
    tied: bool
    dtype: str

    @property
    def bytes_per_element(self) -> int:
        """Bytes per element of weights and KV."""
        return 4 if self.dtype == "float32" else 2

    @property
    def matrix_elements(self) -> int:
        """Number of weights in each step's products: all matrices except the embedding, which is a lookup."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_element

    def decode_seconds(self, rows: int, context: int, bandwidth: float, flop_per_s: float) -> float:
        """Return the shortest possible time for a decode step, limited by memory reads or by the products."""
        read = self.matrix_elements * self.bytes_per_element + rows * context * self.kv_bytes_per_token
        return max(read / bandwidth, 2 * rows * self.matrix_elements / flop_per_s)

    def prefill_flop(self, tokens: int) -> float:
        """Return the operations for a prompt: products per token (logits for the last only) and causal attention."""
        body = self.matrix_elements - self.hidden * self.vocab_size
        attention = 4 * self.layers * self.heads * self.head_dim * tokens * (tokens + 1) / 2
        return 2.0 * tokens * body + 2 * self.hidden * self.vocab_size + attention


LLAMA_8B = Shape(
    "llama-3.1-8b-shape", "LlamaForCausalLM", "llama",
    4096, 14336, 32, 32, 8, 128, 128256, 40960, False, "bfloat16",
)  # fmt: skip
QWEN_06B = Shape(
    "qwen3-0.6b-shape", "Qwen3ForCausalLM", "qwen3",
    1024, 3072, 28, 16, 8, 128, 151936, 40960, True, "bfloat16",
)  # fmt: skip
TINY = Shape(
    "tiny-shape", "Qwen3ForCausalLM", "qwen3",
    64, 128, 2, 4, 2, 16, 500, 512, True, "float32",
)  # fmt: skip


def make_folder(shape: Shape, parent: Path) -> Path:
    """Return a checkpoint folder without weights; create it if it does not exist."""
    folder = parent / shape.name
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "initializer_range": 0.02,
        "dtype": shape.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(special) + "\n")
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(shape.vocab_size)}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "t0", "eos_token": "t1", "pad_token": "t2", "unk_token": "t3"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.positions, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return folder
