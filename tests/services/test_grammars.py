"""Grammars at the front door: what is usable passes, what is not costs INVALID_ARGUMENT and nothing else."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from tests.services.stack import running_stack, tokens_request
from tests.services.test_errors import refused, still_serves


def schema(value: object) -> v1.Grammar:
    """A JSON schema."""
    return v1.Grammar(json_schema=json.dumps(value))


def nested(depth: int) -> str:
    """A schema of arrays of arrays."""
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


BAD: list[tuple[str, v1.Grammar]] = [
    ("grammar.json_schema", v1.Grammar(json_schema="{")),
    ("grammar.json_schema", v1.Grammar(json_schema="[1]")),
    ("grammar.json_schema", schema({"type": "nonsense"})),
    ("grammar.json_schema", schema({"type": "string", "minLength": 5, "maxLength": 2})),
    ("grammar.json_schema", schema({"$ref": "http://example.com/schema.json"})),
    ("grammar.json_schema", schema({"$ref": "#"})),
    ("grammar.json_schema", schema({"$ref": "#/$defs/missing"})),
    ("grammar.json_schema", v1.Grammar(json_schema=nested(3000))),
    ("grammar.json_schema", schema({"enum": ["x" * 200_000]})),
    ("grammar.json_schema", schema({"allOf": [{"pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(12)]})),
    ("grammar.regex", v1.Grammar(regex="(")),
    ("grammar.regex", v1.Grammar(regex="(" * 3000 + ")" * 3000)),
    ("grammar.regex", v1.Grammar(regex="(?=a)b")),
    ("grammar.ebnf", v1.Grammar(ebnf="start: missing")),
    ("grammar.ebnf", v1.Grammar(ebnf="no rule at all")),
    ("grammar.ebnf", v1.Grammar(ebnf="root ::= (")),
    ("grammar.ebnf", v1.Grammar(ebnf="start: " + "(" * 500 + '"a"' + ")" * 500)),
]


@pytest.mark.parametrize(("field", "grammar"), BAD, ids=[f"{field}-{n}" for n, (field, _) in enumerate(BAD)])
def test_a_grammar_that_cannot_be_used_is_refused(tmp_path: Path, field: str, grammar: v1.Grammar) -> None:
    """The field is named, the core hears nothing of it, and the front end serves on."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = tokens_request(1, 2, 3)
            request.grammar.CopyFrom(grammar)
            refusal = await refused(stack.generate(request))

            assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
            assert refusal.fields == [field]
            assert stack.core.submissions == []
            await still_serves(stack)

    asyncio.run(main())


def test_a_grammar_reaches_the_core_in_the_workers_form(tmp_path: Path) -> None:
    """Schemas and expressions as they are, choices and EBNF as Lark; the model's end of sequence always ends."""
    grammars = [
        v1.Grammar(json_schema='{"type":"integer"}'),
        v1.Grammar(regex="a+"),
        v1.Grammar(choice=v1.ChoiceGrammar(choices=["ja", 'ne"in'])),
        v1.Grammar(ebnf='root ::= "a" | "b"'),
        v1.Grammar(json_object=True),
    ]

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for grammar in [*grammars, grammars[0]]:
                request = tokens_request(1, 2, 3, max_tokens=2)
                request.stop.ignore_eos = True
                request.grammar.CopyFrom(grammar)
                await stack.generate(request)

            sent = [plan_pb2.Grammar.FromString(each.grammar) for each in stack.core.submissions]
            assert [each.WhichOneof("kind") for each in sent] == [
                "json_schema", "regex", "lark", "lark", "json_schema", "json_schema",
            ]  # fmt: skip
            assert sent[2].lark == 'start: "ja" | "ne\\"in"'
            assert stack.core.submissions[0].grammar == stack.core.submissions[5].grammar
            assert all(each.stop_token_ids for each in stack.core.submissions)

    asyncio.run(main())
