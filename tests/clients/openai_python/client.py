"""The `openai` package: Chat Completions and Responses."""

import json
import sys
from pathlib import Path
from typing import Literal

import openai
from pydantic import BaseModel

sys.path.append(str(Path(__file__).parents[1]))
from probe import BIRD, CITY, DEMO, FOREVER, KEY, LONG, QUESTION, RECITER, Probe, frees, raises, run

CHAT = Probe("openai (Python), Chat", "openai")
RESPONSES = Probe("openai (Python), Responses", "openai")
CLIENT = openai.OpenAI(base_url=f"{DEMO}/v1", api_key=KEY, max_retries=0)
ENDLESS = openai.OpenAI(base_url=f"{RECITER}/v1", api_key=KEY, max_retries=0)
ASYNC = {"base_url": f"{DEMO}/v1", "api_key": KEY, "max_retries": 0}
USER = {"role": "user", "content": QUESTION}
COMMON = {"model": "demo", "messages": [USER], "temperature": 0}
ASKED = {"model": "demo", "input": QUESTION, "temperature": 0}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": CITY},
}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time in a city", "parameters": CITY}}
TOOLS = [WEATHER, TIME]
FLAT_TOOLS = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
SHORT = {"x-request-timeout": "1"}
"""A deadline that ends a stream with an error."""
IN_ROME = {"role": "user", "content": "What is the weather in Rome?"}


class Bird(BaseModel):
    """A bird."""

    name: Literal["robin", "owl"]
    size: Literal["small", "large"]


def called(calls, name=None):
    """Check the calls of an answer and return the first."""
    assert calls, "no tool was called"
    assert name is None or calls[0].function.name == name, calls[0].function.name
    assert json.loads(calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    return calls[0]


@CHAT.tries("list models")
def _():
    assert [model.id for model in CLIENT.models.list()] == ["demo"]
    assert CLIENT.models.retrieve("demo").id == "demo"


@CHAT.tries("create")
def _():
    answer = CLIENT.chat.completions.create(**COMMON)
    assert "7" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@CHAT.tries("stream")
def _():
    chunks = list(CLIENT.chat.completions.create(**COMMON, stream=True))
    assert "7" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    with CLIENT.chat.completions.stream(**COMMON) as stream:
        assert "7" in stream.get_final_completion().choices[0].message.content


@CHAT.tries("async")
async def _():
    async with openai.AsyncOpenAI(**ASYNC) as client:
        answer = await client.chat.completions.create(**COMMON)
        assert "7" in answer.choices[0].message.content
        stream = await client.chat.completions.create(**COMMON, stream=True)
        assert "7" in "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@CHAT.tries("tools: auto")
def _():
    answer = CLIENT.chat.completions.create(model="demo", messages=[IN_ROME], tools=TOOLS, temperature=0)
    called(answer.choices[0].message.tool_calls, "get_weather")
    assert answer.choices[0].finish_reason == "tool_calls"


@CHAT.tries("tools: required")
def _():
    answer = CLIENT.chat.completions.create(**COMMON, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    called(answer.choices[0].message.tool_calls)
    with CLIENT.chat.completions.stream(
        **COMMON, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        called(stream.get_final_completion().choices[0].message.tool_calls)


@CHAT.tries("tools: named")
def _():
    choice = {"type": "function", "function": {"name": "get_time"}}
    called(
        CLIENT.chat.completions.create(**COMMON, tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls,
        "get_time",
    )


@CHAT.tries("tool messages")
def _():
    forced = CLIENT.chat.completions.create(
        model="demo", messages=[IN_ROME], tools=TOOLS[:1], tool_choice="required", temperature=0
    )
    call = called(forced.choices[0].message.tool_calls)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    answer = CLIENT.chat.completions.create(
        model="demo", messages=[IN_ROME, forced.choices[0].message, result], tools=TOOLS[:1], temperature=0
    )
    assert "sunny" in answer.choices[0].message.content, answer.choices[0].message.content


@CHAT.tries("agent loop: echoes")
def _():
    def goes_on(message):
        result = {"role": "tool", "tool_call_id": called([*message_calls(message)]).id, "content": "sunny, 21 degrees"}
        answer = CLIENT.chat.completions.create(messages=[IN_ROME, message, result], **asked)
        assert "sunny" in answer.choices[0].message.content, answer.choices[0].message.content

    def message_calls(message):
        return message["tool_calls"] if isinstance(message, dict) else message.tool_calls

    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    asked = {"model": "demo", "tools": [strict], "temperature": 0}
    with CLIENT.chat.completions.stream(messages=[IN_ROME], **asked) as stream:
        goes_on(stream.get_final_completion().choices[0].message)

    calls = {}
    for chunk in CLIENT.chat.completions.create(messages=[IN_ROME], stream=True, **asked):
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.index in calls:
                calls[delta.index].function.arguments += delta.function.arguments
            else:
                calls[delta.index] = delta
    goes_on({"role": "assistant", "tool_calls": list(calls.values())})

    parsed = CLIENT.chat.completions.parse(messages=[IN_ROME], **asked).choices[0].message
    goes_on(parsed)
    result = {"role": "tool", "tool_call_id": parsed.tool_calls[0].id, "content": "sunny, 21 degrees"}
    answer = CLIENT.chat.completions.create(messages=[IN_ROME, parsed.model_dump(), result], **asked)
    assert "sunny" in answer.choices[0].message.content


@CHAT.tries("error: in a stream")
def _():
    asked = {"model": "reciter", "messages": [{"role": "user", "content": FOREVER}], "max_tokens": 100_000}
    with raises(openai.APIError, "deadline"):
        list(ENDLESS.chat.completions.create(**asked, stream=True, extra_headers=SHORT))
    with raises(openai.APIError, "deadline"), ENDLESS.chat.completions.stream(**asked, extra_headers=SHORT) as stream:
        stream.until_done()


@RESPONSES.tries("error: in a stream")
def _():
    asked = {"model": "reciter", "input": FOREVER, "max_output_tokens": 100_000}
    with raises(openai.APIError, "deadline"):
        list(ENDLESS.responses.create(**asked, stream=True, extra_headers=SHORT))
    with raises(openai.APIError, "deadline"), ENDLESS.responses.stream(**asked, extra_headers=SHORT) as stream:
        stream.until_done()


@CHAT.tries("structured output")
def _():
    form = {"type": "json_schema", "json_schema": {"name": "bird", "schema": BIRD, "strict": True}}
    bird = json.loads(CLIENT.chat.completions.create(**COMMON, response_format=form).choices[0].message.content)
    assert set(bird) == {"name", "size"}
    parsed = CLIENT.chat.completions.parse(**COMMON, response_format=Bird, max_tokens=200, extra_body={"seed": 1})
    assert isinstance(parsed.choices[0].message.parsed, Bird)


@CHAT.tries("logprobs")
def _():
    found = CLIENT.chat.completions.create(**COMMON, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in found)


@CHAT.tries("n")
def _():
    answer = CLIENT.chat.completions.create(model="demo", messages=[USER], n=3, max_tokens=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


@CHAT.tries("stop")
def _():
    answer = CLIENT.chat.completions.create(**COMMON, stop=["7"]).choices[0]
    assert (answer.finish_reason, "7" in answer.message.content) == ("stop", False)


@CHAT.tries("seed")
def _():
    texts = {
        CLIENT.completions.create(model="demo", prompt="The old king", max_tokens=8, temperature=1, seed=5)
        .choices[0]
        .text
        for _ in range(2)
    }
    assert len(texts) == 1


@CHAT.tries("usage in stream")
def _():
    *_, last = CLIENT.chat.completions.create(**COMMON, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage.completion_tokens > 0) == ([], True)


@CHAT.tries("embeddings")
def _():
    one, two = CLIENT.embeddings.create(model="demo", input=["a bird", "a king"]).data
    assert len(one.embedding) == len(two.embedding) > 0


@CHAT.tries("error: unknown model")
def _():
    with raises(openai.NotFoundError, code="model_not_found"):
        CLIENT.chat.completions.create(**COMMON | {"model": "gpt-4o"})


@CHAT.tries("error: context overflow")
def _():
    with raises(openai.BadRequestError, "maximum context length", code="context_length_exceeded"):
        CLIENT.chat.completions.create(model="demo", messages=[{"role": "user", "content": LONG}])


@CHAT.tries("error: bad key")
def _():
    with raises(openai.AuthenticationError):
        CLIENT.with_options(api_key="wrong").chat.completions.create(**COMMON)


@CHAT.tries("cancel")
def _():
    with (
        frees(RECITER),
        ENDLESS.chat.completions.create(
            max_tokens=100_000, model="reciter", messages=[{"role": "user", "content": FOREVER}], stream=True
        ) as stream,
    ):
        next(iter(stream))


@CHAT.tries("timeout")
def _():
    with frees(RECITER), raises(openai.APITimeoutError):
        ENDLESS.with_options(timeout=1).chat.completions.create(
            max_tokens=100_000, model="reciter", messages=[{"role": "user", "content": FOREVER}]
        )


@CHAT.tries("reasoning")
def _():
    message = ENDLESS.chat.completions.create(model="reciter", messages=[USER]).choices[0].message
    assert (message.reasoning_content, message.content) == ("I add 3 and 4.", "The answer is 7.")


CHAT.absent("previous_response_id", "part of Responses")
CHAT.absent("count tokens", "OpenAI's Chat API has none")


@RESPONSES.tries("list models")
def _():
    assert [model.id for model in CLIENT.models.list()] == ["demo"]


@RESPONSES.tries("create")
def _():
    response = CLIENT.responses.create(**ASKED)
    assert "7" in response.output_text
    assert response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


@RESPONSES.tries("stream")
def _():
    events = list(CLIENT.responses.create(**ASKED, stream=True))
    assert "7" in "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    with CLIENT.responses.stream(**ASKED) as stream:
        assert "7" in stream.get_final_response().output_text


@RESPONSES.tries("async")
async def _():
    async with openai.AsyncOpenAI(**ASYNC) as client:
        assert "7" in (await client.responses.create(**ASKED)).output_text
        stream = await client.responses.create(**ASKED, stream=True)
        assert "7" in [event async for event in stream][-1].response.output_text


def calls_of(response):
    """Return the calls of a response."""
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls, "no tool was called"
    assert json.loads(calls[0].arguments)["city"] in ("Rome", "Oslo")
    return calls


@RESPONSES.tries("tools: auto")
def _():
    (call,) = calls_of(CLIENT.responses.create(model="demo", input=[IN_ROME], tools=FLAT_TOOLS, temperature=0))
    assert call.name == "get_weather"


@RESPONSES.tries("tools: required")
def _():
    calls_of(CLIENT.responses.create(**ASKED, tools=FLAT_TOOLS, tool_choice="required"))
    with CLIENT.responses.stream(
        **ASKED, tools=FLAT_TOOLS, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        calls_of(stream.get_final_response())


@RESPONSES.tries("tools: named")
def _():
    choice = {"type": "function", "name": "get_time"}
    assert calls_of(CLIENT.responses.create(**ASKED, tools=FLAT_TOOLS, tool_choice=choice))[0].name == "get_time"


@RESPONSES.tries("tool messages")
def _():
    common = {"model": "demo", "tools": FLAT_TOOLS[:1], "temperature": 0}
    forced = CLIENT.responses.create(input=[IN_ROME], tool_choice="required", parallel_tool_calls=False, **common)
    (call,) = calls_of(forced)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    answer = CLIENT.responses.create(input=[IN_ROME, *forced.output, result], **common)
    assert "sunny" in answer.output_text, answer.output_text


@RESPONSES.tries("structured output")
def _():
    form = {"format": {"type": "json_schema", "name": "bird", "schema": BIRD, "strict": True}}
    assert set(json.loads(CLIENT.responses.create(**ASKED, text=form).output_text)) == {"name", "size"}
    assert isinstance(CLIENT.responses.parse(**ASKED, text_format=Bird, max_output_tokens=200).output_parsed, Bird)


@RESPONSES.tries("logprobs")
def _():
    response = CLIENT.responses.create(**ASKED, top_logprobs=2, include=["message.output_text.logprobs"])
    found = response.output[0].content[0].logprobs
    assert found
    assert all(len(each.top_logprobs) == 2 for each in found)


@RESPONSES.tries("usage in stream")
def _():
    *_, last = CLIENT.responses.create(**ASKED, stream=True)
    assert last.response.usage.output_tokens > 0


@RESPONSES.tries("error: unknown model")
def _():
    with raises(openai.NotFoundError, code="model_not_found"):
        CLIENT.responses.create(**ASKED | {"model": "gpt-4o"})


@RESPONSES.tries("error: context overflow")
def _():
    with raises(openai.BadRequestError, "maximum context length", code="context_length_exceeded"):
        CLIENT.responses.create(model="demo", input=LONG)


@RESPONSES.tries("error: bad key")
def _():
    with raises(openai.AuthenticationError):
        CLIENT.with_options(api_key="wrong").responses.create(**ASKED)


@RESPONSES.tries("cancel")
def _():
    with (
        frees(RECITER),
        ENDLESS.responses.create(max_output_tokens=100_000, model="reciter", input=FOREVER, stream=True) as stream,
    ):
        next(iter(stream))


@RESPONSES.tries("timeout")
def _():
    with frees(RECITER), raises(openai.APITimeoutError):
        ENDLESS.with_options(timeout=1).responses.create(max_output_tokens=100_000, model="reciter", input=FOREVER)


@RESPONSES.tries("previous_response_id")
def _():
    first = CLIENT.responses.create(**ASKED)
    second = CLIENT.responses.create(model="demo", input="What is 5 + 6?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert CLIENT.responses.retrieve(first.id).output_text == first.output_text
    CLIENT.responses.delete(first.id)
    (item,) = CLIENT.responses.input_items.list(second.id, limit=1).data
    assert item.content[0].text == "What is 5 + 6?"
    events = list(CLIENT.responses.retrieve(second.id, stream=True))
    assert events[-1].response.output_text == second.output_text
    with raises(openai.BadRequestError, code="previous_response_not_found"):
        CLIENT.responses.create(model="demo", input="And now?", previous_response_id=first.id)


@RESPONSES.tries("count tokens")
def _():
    assert CLIENT.responses.input_tokens.count(model="demo", input=QUESTION).input_tokens > 3


@RESPONSES.tries("reasoning")
def _():
    reasoning, message = ENDLESS.responses.create(model="reciter", input=QUESTION).output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "I add 3 and 4.")
    assert message.content[0].text == "The answer is 7."


for name in ("n", "stop", "seed"):
    RESPONSES.absent(name, "OpenAI's Responses API has none")
RESPONSES.absent("embeddings", "see Chat")

run(CHAT, RESPONSES)
