"""A tiny checkpoint that recites: its chat template determines its responses, so that tests are deterministic.

Each token has one successor: a token's embedding is a unit vector, attention and MLP add nothing, and the head maps a
token to its successor. A recital begins with the prompt's last token. The chat template therefore chooses the
recital by ending the prompt with the recital's first token. The default template has one recital, which begins with
`<|assistant|>`. It shows tools in the format of the family `hermes`.
"""

import json
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = "<|eos|>"
"""The token that ends an answer."""
_SPECIAL = ("<|pad|>", "<|bos|>", EOS, "<|assistant|>")
_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_reciting_model(folder: Path, says: Sequence[str], *, max_model_len: int = 1 << 17) -> Path:
    """Write a checkpoint that always outputs these different pieces of text, one token each; return its folder."""
    return make_reciter(folder, [("<|assistant|>", *says, EOS)], _TEMPLATE, max_model_len=max_model_len)


def make_reciter(
    folder: Path,
    recitals: Collection[Sequence[str]],
    template: str,
    *,
    max_model_len: int = 1 << 17,
) -> Path:
    """Write a checkpoint that continues its prompt's last token with the recital that contains it.

    Args:
        folder: where the checkpoint is written.
        recitals: sequences of tokens. A token that occurs in several recitals has the same successor in all of them.
            Tokens of the form `<|NAME|>` are not shown in responses.
        template: the chat template, in the language of Jinja.
        max_model_len: maximum length of a sequence, tokens.

    Returns:
        `folder`.

    Raises:
        ValueError: a token has two successors.
    """
    successors: dict[str, str] = {}
    for token, successor in (pair for recital in recitals for pair in pairwise(recital)):
        if successors.setdefault(token, successor) != successor:
            raise ValueError(f"recitals: {token!r} has two successors: {successors[token]!r}, {successor!r}; drop one")
    tokens = dict.fromkeys([*_SPECIAL, *successors, *successors.values()])
    hidden = [token for token in tokens if token.startswith("<|")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*hidden, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(hidden)
    shown = [token for token in tokens if token not in hidden]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in shown])
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks | {"chat_template": template}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": size,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": size // 64, "num_key_value_heads": 1,
        "head_dim": 64, "max_position_embeddings": max_model_len, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    head = torch.zeros(size, size)
    for token, successor in successors.items():
        head[tokenizer.token_to_id(successor), tokenizer.token_to_id(token)] = 10.0
    sizes = {"q_proj": (size, size), "k_proj": (64, size), "v_proj": (64, size), "o_proj": (size, size)}
    weights = {f"self_attn.{name}.weight": torch.zeros(shape) for name, shape in sizes.items()}
    weights |= {f"mlp.{name}_proj.weight": torch.zeros(64, size) for name in ("gate", "up")}
    weights["mlp.down_proj.weight"] = torch.zeros(size, 64)
    weights |= {f"{name}_layernorm.weight": torch.ones(size) for name in ("input", "post_attention")}
    weights = {f"model.layers.0.{name}": weight for name, weight in weights.items()}
    weights |= {"model.norm.weight": torch.ones(size), "model.embed_tokens.weight": torch.eye(size)}
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
