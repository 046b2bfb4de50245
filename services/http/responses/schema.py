"""Body of OpenAI's Responses API."""

from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from services.http.schema import (
    CACHE_RETENTION,
    CacheRetention,
    Ignored,
    JsonObject,
    Metadata,
    OpenBody,
    SamplingOptions,
    ScheduledBody,
    Uint32,
    at_most,
)
from services.text.chat import MAX_MESSAGES

MAX_TOOLS = 512
_MAX_INCLUDED = 64


class InputPart(OpenBody):
    """One part of a message or of a tool's output."""

    type: str
    text: str = ""


class InputItem(OpenBody):
    """One conversation item: a message, a tool call, a tool's output, or reasoning."""

    type: str = "message"
    id: str = ""
    role: str = ""
    content: str | Annotated[list[InputPart], Field(fail_fast=True), at_most(MAX_MESSAGES)] | None = None
    call_id: str = ""
    namespace: str = ""
    name: str = ""
    arguments: str = ""
    input: str = Field(default="", description="the input of a custom tool")
    action: JsonObject | None = Field(default=None, description="the command of a local shell")
    output: str | Annotated[list[InputPart], Field(fail_fast=True), at_most(MAX_MESSAGES)] | None = None


class ResponseTool(OpenBody):
    """A tool. The model gets only tools of type `function` and `custom`, including those in a `namespace`."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    format: JsonObject | None = Field(default=None, description="the form of a custom tool's input")
    tools: "Annotated[list[ResponseTool], Field(fail_fast=True)] | None" = Field(
        default=None, max_length=MAX_TOOLS, description="of a namespace"
    )


class NamedResponseTool(OpenBody):
    """The tool that must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str = ""


class AllowedResponseTools(OpenBody):
    """The model sees all tools, and may call some of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedResponseTool], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_TOOLS)


class TextFormat(OpenBody):
    """Required form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: JsonObject | None = Field(default=None, alias="schema")


class TextOptions(OpenBody):
    """Options of the text."""

    format: TextFormat | None = None


class ReasoningOptions(OpenBody):
    """Options of the reasoning."""

    effort: str | None = Field(default=None, description="passed to the chat template as reasoning_effort")
    summary: str | None = Field(default=None, description="if given, the reasoning is in `summary`, else in `content`")


_NO_EFFECT = "accepted without effect"


class ResponsesBody(ScheduledBody, SamplingOptions):
    """A conversation to continue, in OpenAI's Responses API."""

    not_supported: ClassVar = MappingProxyType(
        {
            "conversation": "use previous_response_id, or pass the whole conversation as input",
            "image": "remove it; only text is generated",
            "moderation": "remove it; the server does not classify content",
            "prompt": "prompt templates are not stored; use instructions and input",
        }
    )

    model: str = ""
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    background: Literal[False] = Field(default=False, description="responses are not computed in the background")
    max_output_tokens: Annotated[int, Field(ge=1, le=0xFFFFFFFF)] | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedResponseTool | AllowedResponseTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Field(fail_fast=True), at_most(_MAX_INCLUDED)] | None = Field(
        default=None, description="message.output_text.logprobs: log-probabilities; others have no effect"
    )
    top_logprobs: Uint32 | None = None
    metadata: Metadata | None = None
    user: str | None = None
    access_programs: Ignored = Field(default=None, description=_NO_EFFECT)
    background_options: Ignored = Field(default=None, description=_NO_EFFECT)
    client_metadata: Ignored = Field(default=None, description=_NO_EFFECT)
    context_management: Ignored = Field(default=None, description="accepted without effect: the context is never cut")
    max_tool_calls: Ignored = Field(default=None, description="accepted without effect: clients run the tools")
    personality: Ignored = Field(default=None, description=_NO_EFFECT)
    prompt_cache_key: Ignored = Field(default=None, description="accepted without effect: prefixes have no names")
    prompt_cache_options: Ignored = Field(default=None, description=_NO_EFFECT)
    prompt_cache_retention: CacheRetention = CACHE_RETENTION
    safety_identifier: Ignored = Field(default=None, description=_NO_EFFECT)
    service_tier: Ignored = Field(default=None, description=_NO_EFFECT)
    stream_options: Ignored = Field(default=None, description="accepted without effect: streams are not padded")
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="accepted without effect: a conversation that is too long is an error"
    )

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are requested."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
