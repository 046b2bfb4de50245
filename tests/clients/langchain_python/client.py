"""LangChain: langchain-openai (Chat and Responses), langchain-anthropic, and the agent loop of `create_agent`."""

import sys
from pathlib import Path
from typing import Literal

import anthropic
import openai
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

sys.path.append(str(Path(__file__).parents[1]))
from probe import DEMO, FOREVER, KEY, LONG, QUESTION, RECITER, WEATHER_ANSWER, Probe, frees, raises, run

CHAT = Probe("LangChain, ChatOpenAI", "langchain", "langchain-openai")
RESPONSES = Probe("LangChain, ChatOpenAI with Responses", "langchain", "langchain-openai")
MESSAGES = Probe("LangChain, ChatAnthropic", "langchain", "langchain-anthropic")
IN_ROME = HumanMessage("What is the weather in Rome?")
TOOL_CALLS: list[str] = []


class Bird(BaseModel):
    """A bird."""

    name: Literal["robin", "owl"]
    size: Literal["small", "large"]


@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    TOOL_CALLS.append(city)
    return WEATHER_ANSWER


@tool
def get_time(city: Literal["Rome", "Oslo"]) -> str:
    """Return the time in a city."""
    return "noon"


TOOLS = [get_weather, get_time]


def openai_chat(url=DEMO, model="demo", key=KEY, **options):
    return ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_retries=0, **{"temperature": 0, **options})


def openai_responses(url=DEMO, **options):
    return openai_chat(url, use_responses_api=True, **options)


def anthropic_messages(url=DEMO, model="demo", key=KEY, **options):
    return ChatAnthropic(
        base_url=url, api_key=key, model=model, max_retries=0, **{"temperature": 0, "max_tokens": 200, **options}
    )


def try_all(probe, make, errors):
    """Try the features that all chat models of LangChain have; `errors` is the package with the client's exceptions."""
    required = "any" if errors is anthropic else "required"

    @probe.tries("create")
    def _():
        message = make().invoke(QUESTION)
        assert "7" in message.text
        assert message.usage_metadata["output_tokens"] > 0

    @probe.tries("stream")
    def _():
        assert "7" in "".join(chunk.text for chunk in make().stream(QUESTION))

    @probe.tries("async")
    async def _():
        assert "7" in (await make().ainvoke(QUESTION)).text
        assert "7" in "".join([chunk.text async for chunk in make().astream(QUESTION)])

    @probe.tries("usage in stream")
    def _():
        options = {} if errors is anthropic else {"stream_usage": True}
        usages = [chunk.usage_metadata for chunk in make(**options).stream(QUESTION) if chunk.usage_metadata]
        assert sum(usage["output_tokens"] for usage in usages) > 0

    @probe.tries("tools: auto")
    def _():
        (call,) = make().bind_tools(TOOLS).invoke([IN_ROME]).tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})

    @probe.tries("tools: required")
    def _():
        model = make().bind_tools(TOOLS, tool_choice=required, parallel_tool_calls=False)
        (call,) = model.invoke([IN_ROME]).tool_calls
        assert call["name"] in ("get_weather", "get_time")

    @probe.tries("tools: named")
    def _():
        (call,) = make().bind_tools(TOOLS, tool_choice="get_time").invoke([IN_ROME]).tool_calls
        assert call["name"] == "get_time"

    @probe.tries("tool messages")
    def _():
        forced = make().bind_tools(TOOLS, tool_choice="get_weather", parallel_tool_calls=False).invoke([IN_ROME])
        result = ToolMessage(WEATHER_ANSWER, tool_call_id=forced.tool_calls[0]["id"])
        answer = make().bind_tools(TOOLS).invoke([IN_ROME, forced, result]).text
        assert "sunny" in answer, answer

    @probe.tries("agent loop")
    def _():
        TOOL_CALLS.clear()
        agent = create_agent(make(), tools=TOOLS)
        messages = agent.invoke({"messages": [IN_ROME]}, {"recursion_limit": 8})["messages"]
        assert TOOL_CALLS == ["Rome"]
        assert "sunny" in messages[-1].text, messages[-1].text

    @probe.tries("structured output")
    def _():
        assert isinstance(make().with_structured_output(Bird, method="json_schema").invoke("Describe a bird."), Bird)
        assert isinstance(make().with_structured_output(Bird, method="function_calling").invoke("A bird."), Bird)

    @probe.tries("error: unknown model")
    def _():
        with raises(errors.NotFoundError):
            make(model="gpt-4o").invoke(QUESTION)

    @probe.tries("error: context overflow")
    def _():
        with raises(ContextOverflowError):
            make().invoke(LONG)

    @probe.tries("error: bad key")
    def _():
        with raises(errors.AuthenticationError):
            make(key="wrong").invoke(QUESTION)

    @probe.tries("cancel")
    def _():
        with frees(RECITER):
            stream = make(RECITER, model="reciter", max_tokens=100_000).stream(FOREVER)
            next(stream)
            stream.close()

    @probe.tries("timeout")
    def _():
        with frees(RECITER), raises(errors.APITimeoutError):
            make(RECITER, model="reciter", max_tokens=100_000, timeout=1).invoke(FOREVER)


try_all(CHAT, openai_chat, openai)
try_all(RESPONSES, openai_responses, openai)
try_all(MESSAGES, anthropic_messages, anthropic)


@CHAT.tries("stop")
def _():
    assert "7" not in openai_chat().invoke(QUESTION, stop=["7"]).text


@MESSAGES.tries("stop")
def _():
    assert "7" not in anthropic_messages().invoke(QUESTION, stop=["7"]).text


@CHAT.tries("n")
def _():
    (choices,) = openai_chat(n=3, temperature=1).generate([[HumanMessage(QUESTION)]]).generations
    assert len(choices) == 3


@CHAT.tries("seed")
def _():
    assert (
        len({openai_chat(seed=5, temperature=1, max_tokens=8).invoke("Tell me a story.").text for _ in range(2)}) == 1
    )


@CHAT.tries("logprobs")
def _():
    found = openai_chat(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert all(len(each["top_logprobs"]) == 2 for each in found)


@CHAT.tries("embeddings")
def _():
    model = OpenAIEmbeddings(base_url=f"{DEMO}/v1", api_key=KEY, model="demo", check_embedding_ctx_length=False)
    assert len(model.embed_query("a bird")) == len(model.embed_documents(["a king"])[0]) > 0


@RESPONSES.tries("previous_response_id")
def _():
    model = openai_responses(use_previous_response_id=True)
    first = model.invoke([HumanMessage(QUESTION)])
    second = model.invoke([HumanMessage(QUESTION), first, HumanMessage("What is 5 + 6?")])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    assert second.id != first.id


@RESPONSES.tries("reasoning")
def _():
    blocks = openai_responses(RECITER, model="reciter", reasoning={"summary": "auto"}).invoke(QUESTION).content_blocks
    assert [block["type"] for block in blocks] == ["reasoning", "text"]
    assert blocks[0].get("reasoning") == "I add 3 and 4.", blocks[0]


@MESSAGES.tries("reasoning")
def _():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    blocks = anthropic_messages(RECITER, model="reciter", thinking=thinking, max_tokens=2000).invoke(QUESTION).content
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("I add 3 and 4.", "The answer is 7.")


@MESSAGES.tries("count tokens")
def _():
    assert anthropic_messages().get_num_tokens_from_messages([HumanMessage(QUESTION)]) > 3


CHAT.absent(
    "reasoning", "ChatOpenAI drops reasoning_content, as its documentation says; with Responses it has reasoning"
)
CHAT.absent("count tokens", "LangChain counts with tiktoken, which knows OpenAI's models only")
RESPONSES.absent("logprobs", "ChatOpenAI drops them from responses")
RESPONSES.absent("stop", "OpenAI's Responses API has none")
RESPONSES.absent("count tokens", "LangChain counts with tiktoken, which knows OpenAI's models only")

run(CHAT, RESPONSES, MESSAGES)
