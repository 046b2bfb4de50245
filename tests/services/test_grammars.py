"""Grammars at the front door: what is usable passes, what is not costs INVALID_ARGUMENT and nothing else."""

import asyncio
import json
import threading
from pathlib import Path

import grpc
import pytest

from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.grammars import MAX_WAITING, GrammarChecker
from shared.errors import InvalidRequestError, OverloadedError
from tests.services.stack import MODEL, PATIENCE_S, running_stack, tokens_request
from tests.services.test_errors import refused, still_serves
from tests.services.tokenizers_for_tests import byte_level, write_model


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


class SlowCompiler:
    """Stands for the library: compiles when it is let go, and says what and when it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._begins = asyncio.Event()
        monkeypatch.setattr("services.grammars.compile_grammar", self._compile)

    async def first(self) -> None:
        """Waits until the first grammar is being compiled."""
        await self._begins.wait()

    def _compile(self, grammar: plan_pb2.Grammar, _tokenizer: object) -> None:
        self.begun.append(grammar.regex)
        self._loop.call_soon_threadsafe(self._begins.set)
        assert self.go.wait(PATIENCE_S)


def test_grammars_of_those_who_left_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is compiled at a time and so many may wait for their turn; who leaves meanwhile makes room, and costs no
    work."""
    write_model(tmp_path, byte_level())

    async def main() -> None:
        compiler, checker = SlowCompiler(monkeypatch), GrammarChecker(tmp_path / "tokenizer.json")

        def check(regex: str) -> "asyncio.Task[bytes]":
            return asyncio.create_task(checker.check(v1.Grammar(regex=regex), MODEL))

        first = check("first")
        await compiler.first()
        leaving = [check(f"leaves {number}") for number in range(MAX_WAITING - 1)]
        with pytest.raises(OverloadedError):
            await check("one too many")
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        last = check("last")
        compiler.go.set()
        await asyncio.gather(first, last)
        checker.close()

        assert compiler.begun == ["first", "last"]

    asyncio.run(main())


def test_who_does_not_come_to_its_turn_may_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that takes too long is its client's affair; who only waited behind it is told to come again."""
    monkeypatch.setattr("services.grammars.TIMEOUT_S", 0.05)
    write_model(tmp_path, byte_level())

    async def main() -> None:
        compiler, checker = SlowCompiler(monkeypatch), GrammarChecker(tmp_path / "tokenizer.json")
        first = asyncio.create_task(checker.check(v1.Grammar(regex="slow"), MODEL))
        await compiler.first()
        with pytest.raises(OverloadedError):
            await checker.check(v1.Grammar(regex="behind it"), MODEL)
        with pytest.raises(InvalidRequestError, match="takes longer"):
            await first
        compiler.go.set()
        checker.close()

    asyncio.run(main())
