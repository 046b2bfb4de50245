"""A tiny checkpoint that reasons, calls a tool, or never ends, whatever its prompt contains.

The embedded model does not reason, and its answers are short. This model recites: each token has one successor. The
embedding of a token is a unit vector, attention and MLP add nothing, and the head maps each token to its successor. The
chat template chooses where the recital begins.

* Normally the prompt ends with `<think>`. The model reasons, then says that the answer is 7.
* With a message that contains "forever", it never ends.
"""

from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REASONING = "I add 3 and 4."
ANSWER = "The answer is 7."
CONTEXT = 1 << 17

_SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|forever|>"]
_CHAINS = (
    ["<think>", "I add", " 3 and", " 4.", "</think>", "The answer", " is 7.", "<|eos|>"],
    ["<|assistant|>", "The answer"],
    ["<|forever|>", " and on", " and on,", " and on"],
)
# A bare "<tool_call>" is what tells the server's parsers that a template knows tools.
_TEMPLATE = (
    "{% set ns = namespace(forever=false) %}{% for message in messages %}"
    "{% if message.content and 'forever' in message.content %}{% set ns.forever = true %}{% endif %}"
    "<|user|>{{ message.content or '' }}{% endfor %}"
    "{% if add_generation_prompt %}{% if ns.forever %}<|assistant|><|forever|>"
    "{% elif enable_thinking is defined and not enable_thinking %}<|assistant|>"
    "{% else %}<|assistant|><think>{% endif %}{% endif %}"
)


def make_reciter(folder: Path) -> Path:
    """Write the checkpoint and return its folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    spoken = dict.fromkeys(token for chain in _CHAINS for token in chain if token not in _SPECIAL)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in spoken])
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|eos|>",
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=64, num_hidden_layers=1, num_attention_heads=size // 64,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for chain in _CHAINS:
            ids = [tokenizer.token_to_id(token) for token in chain]
            for token, successor in pairwise(ids):
                model.lm_head.weight[successor, token] = 10.0
    model.save_pretrained(folder)
    return folder
