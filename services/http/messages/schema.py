"""Bodies of Anthropic's Messages API."""

from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from services.http.schema import Ignored, JsonObject, Metadata, OpenBody, ScheduledBody, Uint32, at_most
from services.requests.validation import MAX_STOP_STRINGS
from services.text.chat import MAX_MESSAGES

_MAX_TOOLS = 512


class CacheControl(OpenBody):
    """A cache breakpoint. Prefixes are found without it."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = Field(
        default=None, description="the longest one in the request is used as retention_s"
    )


class Block(OpenBody):
    """A message block: text, thinking, a tool call, or a tool result."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: JsonObject = Field(default_factory=dict)
    tool_use_id: str = ""
    content: "str | Annotated[list[Block], Field(fail_fast=True), at_most(MAX_MESSAGES)] | None" = None
    cache_control: CacheControl | None = None


class Turn(OpenBody):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True), at_most(MAX_MESSAGES)]


class MessagesTool(OpenBody):
    """A tool; the model gets only tools with an `input_schema`."""

    type: str = "custom"
    name: str = ""
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class MessagesToolChoice(OpenBody):
    """Choice of the tools that the model must or may use."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(OpenBody):
    """Whether the model reasons first, if its chat template has a switch (`enable_thinking`)."""

    type: str


class OutputFormat(OpenBody):
    """Required form of the text."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(OpenBody):
    """Options of the output."""

    effort: str | None = Field(default=None, description="passed to the chat template as reasoning_effort")
    format: OutputFormat | None = None


_NO_EFFECT = "accepted without effect"


class CountTokensBody(ScheduledBody):
    """A conversation, in Anthropic's Messages API.

    Unknown options are ignored, because they cannot change the number of tokens.
    """

    model_config = ConfigDict(extra="ignore")
    not_supported: ClassVar = MappingProxyType(
        {
            "container": "remove it; the server runs no code",
            "mcp_servers": "call the servers' tools from the client, and give the tools in tools",
            "thread": "pass the whole conversation in messages",
        }
    )

    model: str = ""
    messages: Annotated[list[Turn], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Annotated[list[Block], Field(fail_fast=True), at_most(MAX_MESSAGES)] | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(default=None, description="the old name of output_config.format")
    betas: Ignored = Field(default=None, description=_NO_EFFECT)
    billing_policy: Ignored = Field(default=None, description=_NO_EFFECT)
    cache_control: CacheControl | None = None
    compaction: Ignored = Field(default=None, description="accepted without effect: the context is never cut")
    context_management: Ignored = Field(default=None, description="accepted without effect: the context is never cut")
    diagnostics: Ignored = Field(default=None, description=_NO_EFFECT)
    fallback_credit_token: Ignored = Field(default=None, description=_NO_EFFECT)
    fallbacks: Ignored = Field(default=None, description=_NO_EFFECT)
    inference_geo: Ignored = Field(default=None, description=_NO_EFFECT)
    service_tier: Ignored = Field(default=None, description=_NO_EFFECT)
    speed: Ignored = Field(default=None, description=_NO_EFFECT)
    user_profile_id: Ignored = Field(default=None, description=_NO_EFFECT)
    workspace_id: Ignored = Field(default=None, description=_NO_EFFECT)


class MessagesBody(CountTokensBody):
    """A conversation to continue, in Anthropic's Messages API."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: Annotated[Uint32, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True), at_most(MAX_STOP_STRINGS)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, le=0x7FFFFFFF)] | None = None
    metadata: Metadata | None = None
