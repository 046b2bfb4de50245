"""The tokenizer of the embedded model: byte-level BPE, every digit a token of its own.

A number of n digits has n tokens, which makes addition learnable for a small model. The alphabet is bytes, so any text
can be encoded without an unknown token. The chat template writes one special token before each turn and ends each
answer with `<|endoftext|>`, where generation stops.

    python -m tools.demo_model.tokenizer build/demo_model/tokenizer
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_model.corpus import ASSISTANT, BOS, EOS, EVEN, PAD, SPECIAL_TOKENS, SYSTEM, USER, document

VOCABULARY = 1024
MAX_LENGTH = 2048

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    f"{{% if message['role'] == 'user' %}}{USER}{{{{ message['content'] }}}}"
    f"{{% elif message['role'] == 'assistant' %}}{ASSISTANT}{{{{ message['content'] }}}}{EOS}"
    f"{{% elif message['role'] == 'system' %}}{SYSTEM}{{{{ message['content'] }}}}"
    "{% else %}{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


def train_tokenizer(seed: int, documents: int = 6000) -> PreTrainedTokenizerFast:
    """Learn the merges from `documents` documents of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_text(seed, documents), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, and a tokenizer_config.json that older releases of transformers read as well."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _plain_text(seed: int, documents: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer/{seed}")
    for _ in range(documents):
        text = document(rng, EVEN, 512).text
        for special in SPECIAL_TOKENS:
            text = text.replace(special, "\n")
        yield text


def main() -> None:
    """Train and save the tokenizer."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of the embedded model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    save_tokenizer(train_tokenizer(arguments.seed), arguments.folder)


if __name__ == "__main__":
    main()
