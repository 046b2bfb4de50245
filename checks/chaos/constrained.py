"""Streams with a JSON schema: random schemas, and the reference's choice under the same masks.

Masks come from llguidance, as in a worker. A separate matcher receives the delivered tokens one by one. If a stream's
matcher loses its state when the stream moves between workers, the first wrongly permitted or forbidden token reveals
this. jsonschema validates the complete text.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonschema import Draft202012Validator

from checks.oracle import Oracle
from shared.grammars import GrammarTokenizer, compile_grammar

MAX_TOKENS = 700
"""More tokens than any of the schemas needs, including white space."""


def draw_schema(rng: random.Random) -> dict[str, Any]:
    """Return one of several hundred schemas whose output always has 100 to 300 bytes."""
    fields: dict[str, Any] = {
        "name": {"type": "string", "pattern": f"^[a-z]{{{rng.randrange(60, 100)}}}$"},
        "kind": {"enum": ["worker", "scheduler", "front end"]},
        "code": {"type": "string", "pattern": "^[0-9A-F]{40}$"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 6, "maxItems": 9},
        "inner": {
            "type": "object",
            "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 999}, "tag": {"const": "deep"}},
            "required": ["count", "tag"],
            "additionalProperties": False,
        },
    }
    chosen = ["name", *rng.sample(["kind", "code", "flags", "inner"], 3)]
    return {
        "type": "object",
        "properties": {name: fields[name] for name in chosen},
        "required": chosen,
        "additionalProperties": False,
    }


def check_text(schema: dict[str, Any], text: str) -> None:
    """Assert that a complete text is JSON that conforms to the schema."""
    Draft202012Validator(schema).validate(json.loads(text))


def masks(oracle: Oracle, schema: dict[str, Any], tokens: list[int]) -> torch.Tensor:
    """Return `[len(tokens) + 1, vocab_size]` bool: the tokens allowed after each prefix of `tokens`.

    After all of them, only end tokens are set.

    Asserts that each token is allowed at its position.
    """
    eos = oracle.eos_token_ids
    tokenizer = _tokenizer(oracle.checkpoint / "tokenizer.json", oracle.vocab_size, tuple(eos))
    matcher = compile_grammar("json_schema", json.dumps(schema), tokenizer)
    allowed = np.zeros((len(tokens) + 1, oracle.vocab_size), np.bool_)
    for index, token in enumerate([*tokens, None]):
        if matcher.is_stopped():
            allowed[index, eos] = True
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed[index] = np.unpackbits(bits, count=oracle.vocab_size, bitorder="little")
        assert not matcher.is_error(), matcher.get_error()
        if token is not None:
            assert allowed[index, token], f"token {index} of {len(tokens)} is not what the schema allows there"
            matcher.consume_token(token)
    return torch.from_numpy(allowed)


@cache
def _tokenizer(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarTokenizer:
    return GrammarTokenizer(path, vocab_size, eos_token_ids)
