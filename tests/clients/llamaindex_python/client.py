"""LlamaIndex: `OpenAILike` and `OpenAILikeEmbedding`, and its own agent loop."""

import sys
from pathlib import Path
from typing import Literal

import openai
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

sys.path.append(str(Path(__file__).parents[1]))
from probe import DEMO, FOREVER, KEY, LONG, QUESTION, RECITER, WEATHER_ANSWER, Probe, frees, raises, run

PROBE = Probe("LlamaIndex", "llama-index-core", "llama-index-llms-openai-like")
TURNS = [ChatMessage(role="user", content=QUESTION)]
IN_ROME = "What is the weather in Rome?"
TOOL_CALLS: list[str] = []
City = Literal["Rome", "Oslo"]


class Bird(BaseModel):
    """A bird."""

    name: Literal["robin", "owl"]
    size: Literal["small", "large"]


def get_weather(city: City) -> str:
    """Return the weather of a city."""
    TOOL_CALLS.append(city)
    return WEATHER_ANSWER


def get_time(city: City) -> str:
    """Return the time in a city."""
    return "noon"


TOOLS = [FunctionTool.from_defaults(get_weather), FunctionTool.from_defaults(get_time)]


def model(url=DEMO, name="demo", key=KEY, **options):
    common = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048, "max_retries": 0}
    return OpenAILike(model=name, api_base=f"{url}/v1", api_key=key, **{"temperature": 0, **common, **options})


@PROBE.tries("create")
def _():
    assert "7" in model().chat(TURNS).message.content
    assert model(is_chat_model=False).complete("Once upon a time").text


@PROBE.tries("stream")
def _():
    assert "7" in "".join(chunk.delta or "" for chunk in model().stream_chat(TURNS))


@PROBE.tries("async")
async def _():
    assert "7" in (await model().achat(TURNS)).message.content
    assert "7" in "".join([chunk.delta or "" async for chunk in await model().astream_chat(TURNS)])


@PROBE.tries("usage in stream")
def _():
    options = {"additional_kwargs": {"stream_options": {"include_usage": True}}}
    *_, last = model(**options).stream_chat(TURNS)
    assert last.raw.usage.completion_tokens > 0


@PROBE.tries("stop")
def _():
    assert "7" not in model().chat(TURNS, stop=["7"]).message.content


@PROBE.tries("seed")
def _():
    options = {"temperature": 1, "max_tokens": 8, "additional_kwargs": {"seed": 5}}
    assert len({model(**options).chat(TURNS).message.content for _ in range(2)}) == 1


@PROBE.tries("logprobs")
def _():
    assert model(logprobs=True, top_logprobs=2).chat(TURNS).logprobs


@PROBE.tries("embeddings")
def _():
    embedding = OpenAILikeEmbedding(model_name="demo", api_base=f"{DEMO}/v1", api_key=KEY)
    assert len(embedding.get_text_embedding("a bird")) > 0


def call_of(answer, name=None):
    """Return the only call of an answer."""
    (call,) = model().get_tool_calls_from_response(answer, error_on_no_tool_call=True)
    assert name is None or call.tool_name == name
    return call


@PROBE.tries("tools: auto")
def _():
    call_of(model().chat_with_tools(TOOLS, user_msg=IN_ROME), "get_weather")


@PROBE.tries("tools: required")
def _():
    call_of(model().chat_with_tools(TOOLS, user_msg=IN_ROME, tool_required=True))


@PROBE.tries("tools: named")
def _():
    call_of(model().chat_with_tools(TOOLS, user_msg=IN_ROME, tool_choice="get_time"), "get_time")


@PROBE.tries("tool messages")
def _():
    asked = ChatMessage(role="user", content=IN_ROME)
    forced = model().chat_with_tools(TOOLS[:1], user_msg=asked, tool_required=True)
    call_id = call_of(forced).tool_id
    result = ChatMessage(role="tool", content=WEATHER_ANSWER, additional_kwargs={"tool_call_id": call_id})
    answer = model().chat_with_tools(TOOLS, chat_history=[asked, forced.message, result]).message.content
    assert "sunny" in answer, answer


@PROBE.tries("agent loop")
async def _():
    TOOL_CALLS.clear()
    agent = FunctionAgent(tools=[get_weather, get_time], llm=model(), streaming=False)
    answer = str(await agent.run(IN_ROME))
    assert TOOL_CALLS == ["Rome"]
    assert "sunny" in answer, answer


@PROBE.tries("structured output")
def _():
    bird = model(should_use_structured_outputs=True).as_structured_llm(Bird).chat(TURNS).raw
    assert isinstance(bird, Bird)


@PROBE.tries("error: unknown model")
def _():
    with raises(openai.NotFoundError):
        model(name="gpt-4o").chat(TURNS)


@PROBE.tries("error: context overflow")
def _():
    with raises(openai.BadRequestError, code="context_length_exceeded"):
        model().chat([ChatMessage(role="user", content=LONG)])


@PROBE.tries("error: bad key")
def _():
    with raises(openai.AuthenticationError):
        model(key="wrong").chat(TURNS)


@PROBE.tries("cancel")
def _():
    with frees(RECITER):
        stream = model(RECITER, "reciter", max_tokens=100_000).stream_chat([ChatMessage(role="user", content=FOREVER)])
        next(stream)
        stream.close()


@PROBE.tries("timeout")
def _():
    with frees(RECITER), raises(openai.APITimeoutError):
        model(RECITER, "reciter", max_tokens=100_000, timeout=1).chat([ChatMessage(role="user", content=FOREVER)])


PROBE.absent("n", "OpenAILike returns the first choice")
PROBE.absent("reasoning", "OpenAILike drops reasoning_content")

run(PROBE)
