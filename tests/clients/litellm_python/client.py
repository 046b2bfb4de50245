"""litellm: the provider `openai/` with another base URL, and `litellm.responses`."""

import os
import sys
from pathlib import Path
from typing import Literal

# Without it, litellm downloads a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel

sys.path.append(str(Path(__file__).parents[1]))
from probe import CITY, DEMO, FOREVER, KEY, LONG, QUESTION, RECITER, WEATHER_ANSWER, Probe, frees, raises, run

PROBE = Probe("litellm", "litellm")
USER = {"role": "user", "content": QUESTION}
AT = {"model": "openai/demo", "api_base": f"{DEMO}/v1", "api_key": KEY, "max_retries": 0, "temperature": 0}
GO_ON = AT | {
    "max_tokens": 100_000,
    "model": "openai/reciter",
    "api_base": f"{RECITER}/v1",
    "messages": [{"role": "user", "content": FOREVER}],
}
COMMON = AT | {"messages": [USER]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather of a city", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "get_time", "description": "The time in a city", "parameters": CITY}},
]
IN_ROME = {"role": "user", "content": "What is the weather in Rome?"}


class Bird(BaseModel):
    """A bird."""

    name: Literal["robin", "owl"]
    size: Literal["small", "large"]


@PROBE.tries("create")
def _():
    answer = litellm.completion(**COMMON)
    assert "7" in answer.choices[0].message.content
    response = litellm.responses(
        input=QUESTION, **{key: AT[key] for key in ("model", "api_base", "api_key")}, temperature=0
    )
    assert "7" in response.output[0].content[0].text


@PROBE.tries("list models")
def _():
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=DEMO, api_key=KEY
    )
    assert any("demo" in name for name in found), found


@PROBE.tries("stream")
def _():
    assert "7" in "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**COMMON, stream=True))


@PROBE.tries("async")
async def _():
    assert "7" in (await litellm.acompletion(**COMMON)).choices[0].message.content
    stream = await litellm.acompletion(**COMMON, stream=True)
    assert "7" in "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@PROBE.tries("usage in stream")
def _():
    chunks = list(litellm.completion(**COMMON, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0


@PROBE.tries("n")
def _():
    assert len(litellm.completion(**COMMON | {"temperature": 1}, n=3, max_tokens=5).choices) == 3


@PROBE.tries("stop")
def _():
    assert "7" not in litellm.completion(**COMMON, stop=["7"]).choices[0].message.content


@PROBE.tries("seed")
def _():
    common = COMMON | {"temperature": 1}
    assert len({litellm.completion(**common, seed=5, max_tokens=8).choices[0].message.content for _ in range(2)}) == 1


@PROBE.tries("logprobs")
def _():
    found = litellm.completion(**COMMON, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(len(each.top_logprobs) == 2 for each in found)


@PROBE.tries("embeddings")
def _():
    answer = litellm.embedding(model="openai/demo", input=["a bird"], api_base=f"{DEMO}/v1", api_key=KEY)
    assert len(answer.data[0]["embedding"]) > 0


def called(answer, name=None):
    """Check a call and return it."""
    call = (answer.choices[0].message.tool_calls or [None])[0]
    assert call is not None, "no tool was called"
    assert name is None or call.function.name == name
    return call


@PROBE.tries("tools: auto")
def _():
    called(litellm.completion(**COMMON | {"messages": [IN_ROME]}, tools=TOOLS), "get_weather")


@PROBE.tries("tools: required")
def _():
    called(litellm.completion(**COMMON, tools=TOOLS, tool_choice="required", parallel_tool_calls=False))


@PROBE.tries("tools: named")
def _():
    choice = {"type": "function", "function": {"name": "get_time"}}
    called(litellm.completion(**COMMON, tools=TOOLS, tool_choice=choice), "get_time")


@PROBE.tries("tool messages")
def _():
    asked = COMMON | {"messages": [IN_ROME], "tools": TOOLS[:1]}
    forced = litellm.completion(**asked, tool_choice="required", parallel_tool_calls=False)
    result = {"role": "tool", "tool_call_id": called(forced).id, "content": WEATHER_ANSWER}
    answer = litellm.completion(**asked | {"messages": [IN_ROME, forced.choices[0].message, result]})
    assert "sunny" in answer.choices[0].message.content, answer.choices[0].message.content


@PROBE.tries("structured output")
def _():
    Bird.model_validate_json(litellm.completion(**COMMON, response_format=Bird).choices[0].message.content)


@PROBE.tries("reasoning")
def _():
    message = litellm.completion(**GO_ON | {"messages": [USER]}).choices[0].message
    assert (message.reasoning_content, message.content) == ("I add 3 and 4.", "The answer is 7.")


@PROBE.tries("error: unknown model")
def _():
    with raises(litellm.NotFoundError):
        litellm.completion(**COMMON | {"model": "openai/gpt-4o"})


@PROBE.tries("error: context overflow")
def _():
    with raises(litellm.ContextWindowExceededError):
        litellm.completion(**COMMON | {"messages": [{"role": "user", "content": LONG}]})


@PROBE.tries("error: bad key")
def _():
    with raises(litellm.AuthenticationError):
        litellm.completion(**COMMON | {"api_key": "wrong"})


@PROBE.tries("cancel")
def _():
    with frees(RECITER):
        stream = litellm.completion(**GO_ON, stream=True)
        next(iter(stream))
        stream.completion_stream.close()


@PROBE.tries("timeout")
def _():
    with frees(RECITER), raises(litellm.Timeout):
        litellm.completion(**GO_ON, timeout=1)


@PROBE.tries("previous_response_id")
def _():
    at = {key: AT[key] for key in ("model", "api_base", "api_key")}
    first = litellm.responses(input=QUESTION, **at)
    second = litellm.responses(input="What is 5 + 6?", previous_response_id=first.id, **at)
    assert second.usage.input_tokens > first.usage.input_tokens


PROBE.absent("count tokens", "litellm counts with tokenizers of its own")

run(PROBE)
