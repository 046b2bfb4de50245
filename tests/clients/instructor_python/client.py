"""instructor: objects of pydantic from an answer, by tools, by a JSON schema and by Responses."""

import asyncio
import sys
from pathlib import Path
from typing import Literal

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field

sys.path.append(str(Path(__file__).parents[1]))
from probe import DEMO, FOREVER, KEY, LONG, QUESTION, RECITER, Probe, frees, raises, run

PROBE = Probe("instructor", "instructor", "openai")
COMMON = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_retries": 0}
GO_ON = {
    "model": "reciter",
    "max_tokens": 100_000,
    "messages": [{"role": "user", "content": FOREVER}],
    "max_retries": 0,
}


class Bird(BaseModel):
    """A bird."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["robin", "owl"]
    size: Literal["small", "large"]


class Story(BaseModel):
    """A text of any length."""

    text: str = Field(min_length=1000)


def client(mode, url=DEMO, key=KEY, make=openai.OpenAI, **options):
    return instructor.from_openai(make(base_url=f"{url}/v1", api_key=key, max_retries=0, **options), mode=mode)


def create(mode, **options):
    return client(mode).chat.completions.create(response_model=Bird, **COMMON, **options)


@PROBE.tries("create")
def _():
    assert isinstance(create(instructor.Mode.JSON_SCHEMA), Bird)


@PROBE.tries("structured output")
def _():
    assert isinstance(create(instructor.Mode.JSON_SCHEMA), Bird)


@PROBE.tries("tools: named")
def _():
    assert isinstance(create(instructor.Mode.TOOLS), Bird)
    assert isinstance(create(instructor.Mode.RESPONSES_TOOLS), Bird)


@PROBE.tries("stream")
def _():
    *_, last = client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(response_model=Bird, **COMMON)
    assert Bird.model_validate(last.model_dump())


@PROBE.tries("async")
async def _():
    asynchronous = client(instructor.Mode.TOOLS, make=openai.AsyncOpenAI)
    assert isinstance(await asynchronous.chat.completions.create(response_model=Bird, **COMMON), Bird)


@PROBE.tries("seed")
def _():
    # instructor adds the whole response to each object, so that two objects are never equal.
    birds = [create(instructor.Mode.TOOLS, seed=5).model_dump() for _ in range(2)]
    assert birds[0] == birds[1]


@PROBE.tries("usage in stream")
def _():
    _, answer = client(instructor.Mode.TOOLS).chat.completions.create_with_completion(response_model=Bird, **COMMON)
    assert answer.usage.completion_tokens > 0


@PROBE.tries("error: unknown model")
def _():
    with raises((openai.NotFoundError, InstructorRetryException), "does not exist"):
        client(instructor.Mode.TOOLS).chat.completions.create(response_model=Bird, **COMMON | {"model": "gpt-4o"})


@PROBE.tries("error: context overflow")
def _():
    with raises((openai.BadRequestError, InstructorRetryException), "maximum context length"):
        turns = [{"role": "user", "content": LONG}]
        client(instructor.Mode.TOOLS).chat.completions.create(response_model=Bird, **COMMON | {"messages": turns})


@PROBE.tries("error: bad key")
def _():
    with raises((openai.AuthenticationError, InstructorRetryException), "token"):
        client(instructor.Mode.TOOLS, key="wrong").chat.completions.create(response_model=Bird, **COMMON)


@PROBE.tries("cancel")
def _():
    # Without asyncio, create_partial reads the whole answer before it returns. With it, the connection is closed when
    # the generators inside instructor are, at the latest at the end of the loop.
    async def leave():
        asynchronous = client(instructor.Mode.JSON_SCHEMA, RECITER, make=openai.AsyncOpenAI)
        stream = asynchronous.chat.completions.create_partial(response_model=Story, **GO_ON)
        await anext(stream)
        await stream.aclose()

    with frees(RECITER):
        asyncio.run(leave())


@PROBE.tries("timeout")
def _():
    with frees(RECITER), raises((openai.APITimeoutError, InstructorRetryException)):
        client(instructor.Mode.JSON_SCHEMA, RECITER, timeout=1).chat.completions.create(response_model=Story, **GO_ON)


for name in ("tools: auto", "tools: required", "tool messages", "n", "stop", "logprobs", "reasoning"):
    PROBE.absent(name, "instructor returns one object; it forces a named tool or a form")

run(PROBE)
