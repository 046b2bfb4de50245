"""The `anthropic` package: the Messages API."""

import sys
from pathlib import Path
from typing import Literal

import anthropic
from pydantic import BaseModel

sys.path.append(str(Path(__file__).parents[1]))
from probe import BIRD, CITY, DEMO, FOREVER, KEY, LONG, QUESTION, RECITER, Probe, frees, raises, run

MESSAGES = Probe("anthropic (Python)", "anthropic")
CLIENT = anthropic.Anthropic(base_url=DEMO, api_key=KEY, max_retries=0)
ENDLESS = anthropic.Anthropic(base_url=RECITER, api_key=KEY, max_retries=0)
COMMON = {
    "model": "demo",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": {"temperature": 0},
}
GO_ON = {"model": "reciter", "max_tokens": 100_000, "messages": [{"role": "user", "content": FOREVER}]}
TOOLS = [
    {"name": "get_weather", "description": "The weather of a city", "input_schema": CITY},
    {"name": "get_time", "description": "The time in a city", "input_schema": CITY},
]
IN_ROME = {"role": "user", "content": "What is the weather in Rome?"}


class Bird(BaseModel):
    """A bird."""

    name: Literal["robin", "owl"]
    size: Literal["small", "large"]


def text_of(message):
    """Return the text of a message."""
    return "".join(block.text for block in message.content if block.type == "text")


def called(message, name=None):
    """Check the use of a tool and return it."""
    uses = [block for block in message.content if block.type == "tool_use"]
    assert uses, "no tool was called"
    assert message.stop_reason == "tool_use", message.stop_reason
    assert uses[0].input["city"] in ("Rome", "Oslo")
    assert name is None or uses[0].name == name
    return uses[0]


@MESSAGES.tries("list models")
def _():
    assert [model.id for model in CLIENT.models.list()] == ["demo"]
    assert CLIENT.models.retrieve("demo").id == "demo"


@MESSAGES.tries("create")
def _():
    message = CLIENT.messages.create(**COMMON)
    assert message._request_id
    assert "7" in text_of(message)
    assert (message.stop_reason, message.usage.output_tokens > 0) == ("end_turn", True)


@MESSAGES.tries("stream")
def _():
    with CLIENT.messages.stream(**COMMON) as stream:
        assert "7" in "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == "end_turn"


@MESSAGES.tries("async")
async def _():
    async with anthropic.AsyncAnthropic(base_url=DEMO, api_key=KEY, max_retries=0) as client:
        assert "7" in text_of(await client.messages.create(**COMMON))
        async with client.messages.stream(**COMMON) as stream:
            assert "7" in text_of(await stream.get_final_message())


@MESSAGES.tries("tools: auto")
def _():
    called(CLIENT.messages.create(**COMMON | {"messages": [IN_ROME]}, tools=TOOLS), "get_weather")


@MESSAGES.tries("tools: required")
def _():
    called(
        CLIENT.messages.create(**COMMON, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    )
    with CLIENT.messages.stream(
        **COMMON, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True}
    ) as stream:
        called(stream.get_final_message())


@MESSAGES.tries("tools: named")
def _():
    called(CLIENT.messages.create(**COMMON, tools=TOOLS, tool_choice={"type": "tool", "name": "get_time"}), "get_time")


@MESSAGES.tries("tool messages")
def _():
    common = {"model": "demo", "max_tokens": 100, "tools": TOOLS[:1], "extra_body": {"temperature": 0}}
    forced = CLIENT.messages.create(
        messages=[IN_ROME], tool_choice={"type": "any", "disable_parallel_tool_use": True}, **common
    )
    result = {"type": "tool_result", "tool_use_id": called(forced).id, "content": "sunny, 21 degrees"}
    turns = [IN_ROME, {"role": "assistant", "content": forced.content}, {"role": "user", "content": [result]}]
    answer = text_of(CLIENT.messages.create(messages=turns, **common))
    assert "sunny" in answer, answer


@MESSAGES.tries("structured output")
def _():
    form = {"format": {"type": "json_schema", "schema": BIRD}}
    bird = Bird.model_validate_json(text_of(CLIENT.messages.create(**COMMON, output_config=form)))
    assert bird.size
    assert isinstance(CLIENT.messages.parse(**COMMON, output_format=Bird).parsed_output, Bird)


@MESSAGES.tries("stop")
def _():
    message = CLIENT.messages.create(**COMMON, stop_sequences=["7"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "7")


@MESSAGES.tries("usage in stream")
def _():
    with CLIENT.messages.stream(**COMMON) as stream:
        usage = stream.get_final_message().usage
    assert usage.output_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens > 0


@MESSAGES.tries("error: unknown model")
def _():
    with raises(anthropic.NotFoundError):
        CLIENT.messages.create(**COMMON | {"model": "claude"})


@MESSAGES.tries("error: context overflow")
def _():
    with raises(anthropic.BadRequestError, "maximum context length"):
        CLIENT.messages.create(**COMMON | {"messages": [{"role": "user", "content": LONG}]})


@MESSAGES.tries("error: bad key")
def _():
    with raises(anthropic.AuthenticationError):
        CLIENT.with_options(api_key="wrong").messages.create(**COMMON)


@MESSAGES.tries("error: in a stream")
def _():
    short = {"x-request-timeout": "1"}
    with raises(anthropic.APIStatusError, "deadline"):
        list(ENDLESS.messages.create(**GO_ON, stream=True, extra_headers=short))
    with raises(anthropic.APIStatusError, "deadline"), ENDLESS.messages.stream(**GO_ON, extra_headers=short) as stream:
        stream.until_done()


@MESSAGES.tries("cancel")
def _():
    with frees(RECITER), ENDLESS.messages.stream(**GO_ON) as stream:
        next(stream.text_stream)


@MESSAGES.tries("timeout")
def _():
    with frees(RECITER), raises(anthropic.APITimeoutError):
        ENDLESS.with_options(timeout=1).messages.create(**GO_ON)


@MESSAGES.tries("count tokens")
def _():
    counted = CLIENT.messages.count_tokens(model="demo", messages=COMMON["messages"]).input_tokens
    usage = CLIENT.messages.create(**COMMON).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@MESSAGES.tries("reasoning")
def _():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    common = {"model": "reciter", "max_tokens": 2000, "messages": COMMON["messages"]}
    with ENDLESS.messages.stream(**common, thinking=thinking) as stream:
        first, second = stream.get_final_message().content
    assert (first.type, first.thinking, second.text) == ("thinking", "I add 3 and 4.", "The answer is 7.")
    (only,) = ENDLESS.messages.create(**common, thinking={"type": "disabled"}).content
    assert only.text == "The answer is 7."


for name in ("logprobs", "n", "seed", "embeddings", "previous_response_id"):
    MESSAGES.absent(name, "Anthropic's API has none")

run(MESSAGES)
