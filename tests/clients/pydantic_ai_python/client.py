"""pydantic-ai: its Chat, Responses and Anthropic models, and its own agent loop."""

import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    ModelAPIError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelSettings,
    NativeOutput,
    ToolOutput,
)
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

sys.path.append(str(Path(__file__).parents[1]))
from probe import DEMO, FOREVER, KEY, LONG, QUESTION, RECITER, WEATHER_ANSWER, Probe, frees, raises, run

CHAT = Probe("pydantic-ai, Chat", "pydantic-ai-slim", "openai")
RESPONSES = Probe("pydantic-ai, Responses", "pydantic-ai-slim", "openai")
MESSAGES = Probe("pydantic-ai, Anthropic", "pydantic-ai-slim", "anthropic")
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


def chat(url=DEMO, model="demo", key=KEY):
    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


def responses(url=DEMO, model="demo", key=KEY):
    return OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


def messages(url=DEMO, model="demo", key=KEY):
    # pydantic-ai knows by their names which models of Anthropic have structured output; others need a profile.
    profile = ModelProfile(supports_json_schema_output=True)
    return AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key=key), profile=profile)


def agent_of(model, **options):
    settings = {"temperature": 0, "max_tokens": 200, **options.pop("settings", {})}
    return Agent(model, model_settings=ModelSettings(**settings), retries=0, **options)


def called(result):
    """Return the names of the tools that were called."""
    parts = [part for message in result.all_messages() for part in message.parts]
    return [part.tool_name for part in parts if isinstance(part, ToolCallPart)]


def try_all(probe, make):
    """Try the features that all models of pydantic-ai have."""

    @probe.tries("create")
    def _():
        result = agent_of(make()).run_sync(QUESTION)
        assert "7" in result.output
        assert result.usage.output_tokens > 0

    @probe.tries("stream")
    async def _():
        async with agent_of(make()).run_stream(QUESTION) as result:
            assert "7" in "".join([text async for text in result.stream_text(delta=True)])

    @probe.tries("usage in stream")
    async def _():
        async with agent_of(make()).run_stream(QUESTION) as result:
            await result.get_output()
            assert result.usage.output_tokens > 0

    @probe.tries("async")
    async def _():
        assert "7" in (await agent_of(make()).run(QUESTION)).output

    @probe.tries("tools: auto")
    def _():
        result = agent_of(make(), tools=[get_weather, get_time]).run_sync(IN_ROME)
        assert called(result)[:1] == ["get_weather"]

    @probe.tries("tools: required")
    def _():
        # An output tool is forced with "required".
        result = agent_of(make(), output_type=[ToolOutput(Bird)], settings={"parallel_tool_calls": False})
        assert isinstance(result.run_sync("Describe a bird.").output, Bird)

    @probe.tries("tool messages")
    def _():
        # The answer to a history that ends with the result of a tool.
        history = [
            ModelRequest([UserPromptPart(IN_ROME)]),
            ModelResponse([ToolCallPart("get_weather", {"city": "Rome"}, "call_1")]),
            ModelRequest([ToolReturnPart("get_weather", WEATHER_ANSWER, "call_1")]),
        ]
        answer = agent_of(make(), tools=[get_weather]).run_sync(message_history=history).output
        assert "sunny" in answer, answer

    @probe.tries("agent loop")
    def _():
        TOOL_CALLS.clear()
        result = agent_of(make(), tools=[get_weather, get_time]).run_sync(IN_ROME)
        assert TOOL_CALLS == ["Rome"]
        assert "sunny" in result.output, result.output

    @probe.tries("structured output")
    def _():
        assert isinstance(agent_of(make(), output_type=NativeOutput(Bird)).run_sync("Describe a bird.").output, Bird)

    @probe.tries("error: unknown model")
    def _():
        with raises(ModelHTTPError, "404"):
            agent_of(make(model="gpt-4o")).run_sync(QUESTION)

    @probe.tries("error: context overflow")
    def _():
        with raises(ModelContextWindowExceededError):
            agent_of(make()).run_sync(LONG)

    @probe.tries("error: bad key")
    def _():
        with raises(ModelHTTPError, "401"):
            agent_of(make(key="wrong")).run_sync(QUESTION)

    @probe.tries("cancel")
    async def _():
        with frees(RECITER):
            agent = agent_of(make(RECITER, "reciter"), settings={"max_tokens": 100_000})
            async with agent.run_stream(FOREVER) as result:
                async for _text in result.stream_text(delta=True):
                    await result.cancel()
                    break

    @probe.tries("timeout")
    def _():
        options = {"max_tokens": 100_000, "timeout": 1, "max_retries": 0}
        with frees(RECITER), raises(ModelAPIError):
            agent_of(make(RECITER, "reciter"), settings=options).run_sync(FOREVER)

    @probe.tries("reasoning")
    def _():
        options = {
            "max_tokens": 4000, "openai_reasoning_summary": "auto",
            "anthropic_thinking": {"type": "enabled", "budget_tokens": 1024},
        }  # fmt: skip
        result = agent_of(make(RECITER, "reciter"), settings=options).run_sync(QUESTION)
        thoughts = [part.content for part in result.all_messages()[-1].parts if isinstance(part, ThinkingPart)]
        assert (thoughts, result.output) == (["I add 3 and 4."], "The answer is 7.")


try_all(CHAT, chat)
try_all(RESPONSES, responses)
try_all(MESSAGES, messages)


@CHAT.tries("seed")
def _():
    agent = agent_of(chat(), settings={"seed": 5, "temperature": 1, "max_tokens": 8})
    assert len({agent.run_sync("Tell me a story.").output for _ in range(2)}) == 1


@CHAT.tries("logprobs")
def _():
    result = agent_of(chat(), settings={"openai_logprobs": True, "openai_top_logprobs": 2}).run_sync(QUESTION)
    assert all(len(each["top_logprobs"]) == 2 for each in result.response.provider_details["logprobs"])


@RESPONSES.tries("logprobs")
def _():
    result = agent_of(responses(), settings={"openai_logprobs": True, "openai_top_logprobs": 2}).run_sync(QUESTION)
    found = result.response.parts[0].provider_details["logprobs"]
    assert all(len(each["top_logprobs"]) == 2 for each in found)


@RESPONSES.tries("previous_response_id")
def _():
    agent = agent_of(responses())
    first = agent.run_sync(QUESTION)
    second = agent.run_sync(
        "What is 5 + 6?", model_settings={"openai_previous_response_id": first.response.provider_response_id}
    )
    assert second.usage.input_tokens > first.usage.input_tokens


for probe, make in ((CHAT, chat), (MESSAGES, messages)):

    @probe.tries("stop")
    def _(make=make):
        assert "7" not in agent_of(make(), settings={"stop_sequences": ["7"]}).run_sync(QUESTION).output


RESPONSES.absent("stop", "OpenAI's Responses API has none")

run(CHAT, RESPONSES, MESSAGES)
