"""The bundled model's tokenizer (byte-level BPE with one token per digit) and chat template.

A number with n digits has n tokens, which makes addition learnable for a small model. The alphabet is bytes, so any
text can be encoded without an unknown token. The chat template writes one special token before each turn and ends each
answer with `<|endoftext|>`, where generation stops.

    python -m tools.demo_model.tokenizer build/demo_model/tokenizer
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_model.corpus import (
    ASSISTANT,
    BOS,
    CALL,
    CALL_END,
    EOS,
    EVEN,
    MARKERS,
    PAD,
    RESPONSE,
    RESPONSE_END,
    SPECIAL_TOKENS,
    SYSTEM,
    TOOLS,
    TOOLS_END,
    USER,
    document,
)
from tools.demo_model.errand import MOST_DESCRIPTION

VOCABULARY = 1024
MAX_LENGTH = 2048

_MOST_OPTIONS = 6

CHAT_TEMPLATE = f"""
{{%- macro type_of(schema) -%}}
    {{%- set types = namespace(first='any') -%}}
    {{%- if schema is mapping -%}}
        {{%- for each in [schema] + (schema['anyOf'] or []) + (schema['oneOf'] or []) if types.first == 'any' -%}}
            {{%- if each is not mapping -%}}
            {{%- elif each['enum'] -%}}
                {{%- set types.first = each['enum'][:{_MOST_OPTIONS}] | join('|') -%}}
            {{%- else -%}}
                {{%- for type in ([each['type']] if each['type'] is string else each['type'] or [])
                    if type != 'null' and types.first == 'any' -%}}
                    {{%- set types.first = type -%}}
                {{%- endfor -%}}
            {{%- endif -%}}
        {{%- endfor -%}}
    {{%- endif -%}}
    {{{{- types.first -}}}}
{{%- endmacro -%}}
{{%- macro line_of(function) -%}}
    {{%- set schema = function['parameters'] or {{}} -%}}
    {{%- set description = (function['description'] or '').strip().split('\\n')[0][:{MOST_DESCRIPTION}] -%}}
    {{{{- description + ' -> ' if description else '' -}}}}
    {{{{- function['name'] -}}}}(
    {{%- for name, each in (schema['properties'] or {{}}).items()
        if not schema['required'] or name in schema['required'] -%}}
        {{{{- '' if loop.first else ',' -}}}}{{{{- name -}}}}:{{{{- type_of(each) -}}}}
    {{%- endfor -%}}
    )
{{%- endmacro -%}}
{{{{- bos_token -}}}}
{{%- if tools -%}}
    {{{{- '{SYSTEM}' -}}}}
    {{%- if messages[0]['role'] == 'system' and messages[0]['content'] -%}}
        {{{{- messages[0]['content'] + '\\n\\n' -}}}}
    {{%- endif -%}}
    {{{{- '{TOOLS}\\n' -}}}}
    {{%- for tool in tools -%}}
        {{{{- line_of(tool['function'] or tool) + '\\n' -}}}}
    {{%- endfor -%}}
    {{{{- '{TOOLS_END}' -}}}}
{{%- endif -%}}
{{%- for message in messages -%}}
    {{%- set content = message['content'] or '' -%}}
    {{%- if tools and loop.first and message['role'] == 'system' -%}}
    {{%- elif message['role'] == 'user' -%}}
        {{{{- '{USER}' + content -}}}}
    {{%- elif message['role'] == 'assistant' -%}}
        {{{{- '{ASSISTANT}' + content -}}}}
        {{%- for call in message['tool_calls'] or [] -%}}
            {{%- set function = call['function'] or call -%}}
            {{{{- '' if loop.first and not content else '\\n' -}}}}
            {{{{- '{CALL}\\n{{"name": ' + (function['name'] | tojson) + ', "arguments": ' -}}}}
            {{%- set arguments = function['arguments'] or {{}} -%}}
            {{{{- (arguments if arguments is string else arguments | tojson) + '}}\\n{CALL_END}' -}}}}
        {{%- endfor -%}}
        {{{{- '{EOS}' -}}}}
    {{%- elif message['role'] == 'tool' -%}}
        {{{{- '\\n' if not loop.first and loop.previtem['role'] == 'tool' else '{USER}' -}}}}
        {{{{- '{RESPONSE}\\n' + content + '\\n{RESPONSE_END}' -}}}}
    {{%- elif message['role'] == 'system' -%}}
        {{{{- '{SYSTEM}' + content -}}}}
    {{%- else -%}}
        {{{{- raise_exception('unknown role: ' + message['role']) -}}}}
    {{%- endif -%}}
{{%- endfor -%}}
{{{{- '{ASSISTANT}' if add_generation_prompt else '' -}}}}
"""
"""The template shows a tool as one line: the beginning of its description, its name, and the required parameters with
their types. Definitions of several tools then fit the short context. The description stands before the name, because
the model must know what a tool is for when it copies the name. Calls have the form of Hermes and Qwen."""

_PIECES = r" ?\p{Ll}[\p{Ll}\p{M}]*|\p{Lu}[\p{Ll}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"
"""The pieces between which nothing is merged. A capitalised word does not include the blank before it, so that a name
has the same tokens in a question, in JSON and in an answer."""


def train_tokenizer(seed: int, documents: int = 6000) -> PreTrainedTokenizerFast:
    """Learn the merges from `documents` documents of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_text(seed, documents), trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
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
        for special in (*SPECIAL_TOKENS, *MARKERS):
            text = text.replace(special, "\n")
        yield text


def main() -> None:
    """Train and save the tokenizer."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of the bundled model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    save_tokenizer(train_tokenizer(arguments.seed), arguments.folder)


if __name__ == "__main__":
    main()
