"""Parts of an output over gRPC: content, reasoning and tool calls, exactly once, also for clients that resume."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from grpc import aio

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.calls.parts import joined, to_part
from services.parsers import FAMILIES, Event, OutputParser, merged
from services.requests.output import OutputRules
from services.streams.parts import size_of, without_first
from services.streams.stream import Stream, StreamRequest
from services.text.detokenizer import detokenizer_factory
from shared.columns import to_column
from shared.request_spec import RequestSpec
from tests.services.stack import joined_text, running_stack
from tests.services.tokenizers_for_tests import byte_level

OUTPUT = '<think>hm 🙂</think>\nOne.\n<tool_call>\n{"name": "f", "arguments": {"a": "ä"}}\n</tool_call> <tool'
IDS = byte_level().encode(OUTPUT, add_special_tokens=False).ids
TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
EXPECTED = [
    v1.OutputPart(reasoning="hm 🙂"),
    v1.OutputPart(content="One."),
    v1.OutputPart(call_begun=v1.ToolCallBegun(name="f")),
    v1.OutputPart(call_arguments=v1.ToolCallArguments(text='{"a": "ä"}')),
    v1.OutputPart(call_ended=v1.ToolCallEnded()),
    v1.OutputPart(content="<tool"),
]


def without_ids(parts: list[v1.OutputPart]) -> list[v1.OutputPart]:
    """Return the parts without the ids of calls, after a check that there is one."""
    for part in parts:
        if part.HasField("call_begun"):
            assert part.call_begun.id
            part.call_begun.ClearField("id")
    return parts


def request(parse: bool = True) -> v1.GenerateRequest:
    """Return a request that the echo core answers with the output."""
    return v1.GenerateRequest(
        token_ids=v1.TokenIds(ids=IDS),
        stop=v1.StopOptions(max_tokens=len(IDS)),
        output=v1.OutputOptions(parse=parse),
    )


def test_an_output_has_parts(tmp_path: Path) -> None:
    """A stream and a whole response have the same parts, next to the model's own text; by default there are none."""

    async def main() -> None:
        async with running_stack(tmp_path, parser="hermes") as stack:
            deltas, _ = await stack.generate(request())
            once = await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=request()))
            plain, _ = await stack.generate(request(parse=False))

            streamed = joined(part for delta in deltas for part in delta.parts)
            assert joined_text(deltas) == OUTPUT
            assert without_ids(streamed) == EXPECTED
            assert without_ids(list(once.choices[0].parts)) == EXPECTED
            assert not any(delta.parts for delta in plain)

    asyncio.run(main())


def test_the_output_of_a_model_without_markers_is_content(tmp_path: Path) -> None:
    """Its parts are its text."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            deltas, _ = await stack.generate(request())

            assert joined(part for delta in deltas for part in delta.parts) == [v1.OutputPart(content=OUTPUT)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("choice", "tools", "field"),
    [
        (v1.ToolChoice(mode=v1.TOOL_MODE_REQUIRED), "", "chat.tool_choice"),
        (v1.ToolChoice(mode=v1.TOOL_MODE_REQUIRED, name="g"), TOOLS, "chat.tool_choice.name"),
        (v1.ToolChoice(name="f"), TOOLS, "chat.tool_choice.name"),
        (v1.ToolChoice(mode=v1.TOOL_MODE_REQUIRED), '[{"name": "f"}]', "chat.tools_json"),
        (v1.ToolChoice(), TOOLS, "chat.tools_json"),
    ],
)
def test_a_choice_that_is_not_possible_names_its_field(
    tmp_path: Path, choice: v1.ToolChoice, tools: str, field: str
) -> None:
    """A forced call needs a tool with that name; a voluntary one needs a template that shows tools."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            chat = v1.ChatInput(messages=[v1.ChatMessage(role="user", content="x")], tools_json=tools)
            chat.tool_choice.CopyFrom(choice)
            wrong = v1.GenerateRequest(chat=chat, output=v1.OutputOptions(parse=True))
            with pytest.raises(aio.AioRpcError) as error:
                await stack.generate(wrong)
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert (error.value.details() or "").startswith(f"{field}: ")

    asyncio.run(main())


def _stream() -> Stream:
    """Return a stream that has received the whole output."""
    made = StreamRequest(
        spec=RequestSpec(request_id="r", num_prompt_tokens=1, max_tokens=1000),
        prompt=to_column([1]),
        output=OutputRules(parse=True),
        credit=4096,
        arrival=0.0,
    )
    parser = OutputParser(FAMILIES["hermes"].read, new_id=lambda: "id")
    return Stream(made, detokenizer_factory(byte_level())(True), lambda: None, parser)


def _events(stream: Stream) -> list[Event]:
    events: list[Event] = []
    while (batch := stream.take()) is not None:
        events += batch.events
        stream.taken()
    return events


def test_a_client_that_resumes_gets_each_part_once() -> None:
    """Wherever the connection was lost, the parts before and after it are those of an undisturbed stream."""
    for known in range(len(IDS) + 1):
        first = _stream()
        first.receive(0, IDS[:known])
        before = _events(first)
        text = len(byte_level().decode(IDS[:known]).replace("\ufffd", "").encode())
        for parts in (size_of(before), None):
            second = _stream()
            second.receive(0, IDS)
            second.finish(link_pb2.StreamEnd(reason=link_pb2.END_REASON_LENGTH))
            second.skip(known, text, parts)
            after = merged(before + _events(second))

            assert without_ids([to_part(event) for event in after]) == EXPECTED, (known, parts)


def test_a_part_can_be_known_in_part() -> None:
    """The first units are left out, also in the middle of a text."""
    events = OutputParser(FAMILIES["hermes"].read, new_id=lambda: "id").push(OUTPUT.replace("🙂", "").replace("ä", ""))

    assert [size_of(without_first(events, size)) for size in range(size_of(events))] == [
        size_of(events) - size for size in range(size_of(events))
    ]
