"""Bodies of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

from pydantic import Field

from services.http.open_body import OpenBody
from services.http.schema import JsonObject, Uint32
from services.text.chat import MAX_MESSAGES

_MAX_TOOLS = 512


class Block(OpenBody):
    """A block of a message: text, thinking, a use of a tool, or its result."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: JsonObject = Field(default_factory=dict)
    tool_use_id: str = ""
    content: "str | list[Block] | None" = None


class Turn(OpenBody):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(OpenBody):
    """A tool; the model gets only tools with an `input_schema`."""

    type: str = "custom"
    name: str = ""
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


class MessagesToolChoice(OpenBody):
    """Which tools must or may be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(OpenBody):
    """Whether the model thinks first, if its chat template has a switch (`enable_thinking`)."""

    type: str


class OutputFormat(OpenBody):
    """Required form of the text."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(OpenBody):
    """Options of the output."""

    effort: str | None = Field(default=None, description="passed to the chat template as reasoning_effort")
    format: OutputFormat | None = None


class CountTokensBody(OpenBody):
    """A conversation, in Anthropic's Messages API."""

    model: str = ""
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[Block] | None = None
    tools: list[MessagesTool] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(default=None, description="the old name of output_config.format")


class MessagesBody(CountTokensBody):
    """A conversation to continue, in Anthropic's Messages API."""

    max_tokens: Uint32
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, le=0x7FFFFFFF)] | None = None
    metadata: dict[str, Any] | None = None
