"""Structured output of the bundled model through the real processes."""

import asyncio
import json
import os
import re
import signal
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc import aio
from jsonschema import Draft202012Validator

from measure.testbed.service import Served, serve
from quire.v1 import generation_pb2 as v1
from quire.v1.generation_pb2_grpc import GenerationServiceStub
from tests.schemas import Schema, make_schemas

if TYPE_CHECKING:
    from quire.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NUM_SCHEMAS = int(os.environ.get("QUIRE_SCHEMAS", "30"))
"""`make schemas` asks for 200."""


def request(grammar: v1.Grammar, temperature: float, seed: int, max_tokens: int = 1500) -> v1.GenerateOnceRequest:
    """A request that ends when its grammar is complete."""
    return v1.GenerateOnceRequest(
        request=v1.GenerateRequest(
            text="Answer with JSON: ",
            grammar=grammar,
            sampling=v1.SamplingOptions(temperature=temperature, seed=seed),
            stop=v1.StopOptions(max_tokens=max_tokens),
        )
    )


async def answer(stub: "GenerationServiceAsyncStub", asked: v1.GenerateOnceRequest) -> v1.Choice:
    """The one choice of a whole answer."""
    response = await stub.GenerateOnce(asked, timeout=240)
    (choice,) = response.choices
    return choice


def test_every_answer_validates(demo: Served) -> None:
    """For any schema, greedily or at temperature 1, the output ends by itself and `jsonschema` accepts it."""
    schemas = make_schemas(NUM_SCHEMAS)

    async def main(target: str) -> list[tuple[Schema, float, v1.Choice]]:
        gate = asyncio.Semaphore(64)
        async with aio.insecure_channel(target) as channel:
            stub: GenerationServiceAsyncStub = GenerationServiceStub(channel)

            async def ask(schema: Schema, temperature: float, seed: int) -> tuple[Schema, float, v1.Choice]:
                async with gate:
                    grammar = v1.Grammar(json_schema=json.dumps(schema))
                    return schema, temperature, await answer(stub, request(grammar, temperature, seed))

            return await asyncio.gather(
                *(ask(schema, temperature, index) for index, schema in enumerate(schemas) for temperature in (0.0, 1.0))
            )

    answers = asyncio.run(main(demo.grpc))

    assert len(answers) == 2 * NUM_SCHEMAS
    for schema, temperature, choice in answers:
        assert choice.finished.reason == v1.FINISH_REASON_STOP, (temperature, schema, choice.text)
        Draft202012Validator(schema).validate(json.loads(choice.text))


@pytest.mark.every(3)
def test_other_grammars_and_a_worker_that_dies() -> None:
    """Regex, choice, EBNF in two notations and JSON objects constrain the output, also after their worker is killed.

    An ordinary request beside them is not affected.
    """
    kinds = {
        "regex": v1.Grammar(regex=r"[a-c]{400}-\d{3}"),
        "choice": v1.Grammar(choice=v1.ChoiceGrammar(choices=["yes", "no", 'per"haps'])),
        "lark": v1.Grammar(ebnf='start: "<" item{200} ">"\nitem: "ab" | "cd"'),
        "gbnf": v1.Grammar(ebnf='root ::= "(" [0-9]+ ")"'),
        "object": v1.Grammar(json_object=True),
    }
    free = v1.GenerateOnceRequest(
        request=v1.GenerateRequest(
            text="Once upon a time", sampling=v1.SamplingOptions(temperature=0), stop=v1.StopOptions(max_tokens=200)
        )
    )

    async def main(target: str, worker: int) -> dict[str, v1.Choice]:
        async with aio.insecure_channel(target) as channel:
            stub: GenerationServiceAsyncStub = GenerationServiceStub(channel)
            calls = {
                name: asyncio.create_task(answer(stub, request(grammar, 0.8, 5))) for name, grammar in kinds.items()
            }
            calls["free"] = asyncio.create_task(answer(stub, free))
            streamed, seen = v1.Choice(), 0
            async for response in stub.Generate(request(kinds["regex"], 0.8, 6).request):
                seen += 1
                if seen == 20:
                    os.kill(worker, signal.SIGKILL)
                streamed.text += response.delta.text
                streamed.finished.reason = response.finished.reason
            return {name: await call for name, call in calls.items()} | {"streamed": streamed}

    with serve("demo") as served:
        choices = asyncio.run(main(served.grpc, served.pid("worker")))

    text = {name: choice.text for name, choice in choices.items()}
    for name in ("regex", "streamed"):
        assert re.fullmatch(r"[a-c]{400}-\d{3}", text[name])
    assert text["choice"] in ("yes", "no", 'per"haps')
    assert re.fullmatch(r"<(ab|cd){200}>", text["lark"])
    # These two grammars allow any length, so max_tokens may have truncated the outputs.
    ended = {name for name, choice in choices.items() if choice.finished.reason == v1.FINISH_REASON_STOP}
    assert {"regex", "streamed", "choice", "lark"} <= ended
    assert re.fullmatch(r"\(\d+\)" if "gbnf" in ended else r"\(\d+", text["gbnf"])
    assert (
        isinstance(json.loads(text["object"]), dict) if "object" in ended else text["object"].lstrip().startswith("{")
    )
    assert "free" in ended or choices["free"].finished.completion_tokens == 200


def hostile(number: int) -> list[tuple[str, v1.Grammar]]:
    """Grammars that must be refused, with the field to be named; each number gives different ones.

    They demand more than can be generated, keep the library busy for minutes, and overflow its stack.
    """
    rules = "".join(f'r{rule}: "x{number}" r{rule + 1} | "y"\n' for rule in range(4000))
    return [
        ("grammar.regex", v1.Grammar(regex=f"a{{{100_000_000 + number}}}")),
        ("grammar.regex", v1.Grammar(regex="a?" * (20_000 + number))),
        ("grammar.json_schema", v1.Grammar(json_schema=f'{{"type":"integer","multipleOf":{999_983 + 2 * number}}}')),
        ("grammar.ebnf", v1.Grammar(ebnf=f'start: r0\n{rules}r4000: "z"')),
    ]


def test_hostile_grammars_are_refused_and_other_streams_continue(demo: Served) -> None:
    """A hostile grammar is refused by the name of its field, and no process dies.

    Concurrent streams, with new grammars or without one, get complete responses, and none is refused.
    """
    field_of = re.compile(rb"grammar\.(regex|json_schema|ebnf)")

    async def main(target: str) -> None:
        async with aio.insecure_channel(target) as channel:
            stub: GenerationServiceAsyncStub = GenerationServiceStub(channel)

            async def attack(field: str, grammar: v1.Grammar) -> None:
                with pytest.raises(aio.AioRpcError) as refusal:
                    await answer(stub, request(grammar, 0.0, 1))
                assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT, refusal.value.details()
                trailing = dict(refusal.value.trailing_metadata() or ())
                named = field_of.search(bytes(trailing["grpc-status-details-bin"]))
                assert named is not None
                assert named[0].decode() == field

            async def stream(number: int) -> None:
                for length in range(20, 24):
                    asked = request(v1.Grammar(regex=f"[a-c]{{{length}}}-{number}"), 1.0, number).request
                    if number % 2:
                        asked.ClearField("grammar")
                        asked.stop.max_tokens = 60
                        asked.stop.ignore_eos = True
                    responses = [response async for response in stub.Generate(asked)]
                    text = "".join(response.delta.text for response in responses)
                    if number % 2:
                        assert sum(len(response.delta.token_ids) for response in responses) == 60
                    else:
                        assert re.fullmatch(f"[a-c]{{{length}}}-{number}", text)

            attacks = [attack(field, grammar) for number in range(2) for field, grammar in hostile(number)]
            await asyncio.gather(*attacks, *(stream(number) for number in range(8)))

    before = {child.pid for child in demo.children()}
    asyncio.run(main(demo.grpc))
    assert {child.pid for child in demo.children()} == before
