"""Streams under a JSON schema: which schemas they get, and what the reference picks under the same masks.

The masks are llguidance's, as in a worker, from a matcher of our own that is fed the delivered tokens one by one. So a
stream whose matcher came out of step on its way from worker to worker is found at the first token that it allowed or
forbade wrongly; that the whole text conforms is jsonschema's word.
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
"""More than any of the schemas takes, whatever white space the model likes."""


def draw_schema(rng: random.Random) -> dict[str, Any]:
    """One of some hundred schemas whose answers are 100 to 300 bytes long, whatever the model thinks of it."""
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
    """Asserts that a whole answer is JSON that conforms."""
    Draft202012Validator(schema).validate(json.loads(text))


def masks(oracle: Oracle, schema: dict[str, Any], tokens: list[int]) -> torch.Tensor:
    """`[len(tokens) + 1, vocab_size]` bool: what may follow each prefix of `tokens`; at the end, only what ends it.

    Asserts that each of the tokens is allowed where it stands.
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
