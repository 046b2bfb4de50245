"""HTTP request bodies with OpenAI's fields, vLLM's fields, and a few of Quire's own.

Types and per-field limits are checked here; ranges that also apply to gRPC clients are checked in
`services.requests.validation`. A null field counts as absent.

All APIs follow the same policy.

* Unknown options are rejected, because silently ignoring a misspelt option is worse than an error.
* In conversations, unknown fields of messages, parts and tool calls are ignored, because clients send back what they
  received, with additions.
* Fields *accepted without effect* belong to the API but have no effect in Quire.
* `not_supported` in a body lists the API fields that are rejected.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from services.calls.embeddings import MAX_INPUTS
from services.requests.validation import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_IDS,
    MAX_TOKEN_SET,
)
from services.text.chat import MAX_MESSAGES
from shared.request_spec import MAX_RETENTION_PRIORITY, MAX_RETENTION_S

_MAX_PROMPTS = 256
_MAX_TOOLS = 512
_MAX_PARTS = 4096
_MAX_CALLS = 512
_MAX_CHOICES = 4096
_MAX_FIELDS = 256
"""Maximum number of fields in an object; every object in the schema has fewer."""
_MAX_METADATA = 16
_MAX_UINT32 = 0xFFFFFFFF

_FOUND_BY_CONTENT = "accepted without effect: cached prefixes are found by content"
_WHITESPACE = "allow whitespace between the tokens of JSON; by default JSON is compact"

Uint32 = Annotated[int, Field(ge=0, le=_MAX_UINT32)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_UINT32)]


MAX_JSON_VALUES = 1 << 16
"""Maximum number of values in a field without a schema. More values never fit into a grammar or a template."""


def _few_values(value: object, info: ValidationInfo) -> object:
    """Refuse a value with too many parts before examining any part. Small bodies are not counted.

    All fields of a body together may have twice as many parts as one field.
    """
    budget: list[int] | None = info.context[JSON_BUDGET] if info.context else None
    if budget is None:
        return value
    most = left = min(MAX_JSON_VALUES, budget[0])
    containers = [value]
    while containers:
        each = containers.pop()
        parts = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        left -= len(parts)
        if left < 0:
            raise PydanticCustomError("too_many_values", "too many values", {"max_length": MAX_JSON_VALUES})
        containers.extend(part for part in parts if isinstance(part, dict | list))
    budget[0] -= most - left
    return value


JSON_BUDGET = "json_budget"
"""Key in the validation context for a list with the remaining number of values in fields without a schema.

None: the body has at most MAX_JSON_VALUES values, so nothing is counted.
"""
JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_few_values)]
Ignored = Any
"""Type of a field without effect. Every JSON value is accepted without being examined."""


def at_most(count: int) -> BeforeValidator:
    """Return a validator that refuses a list or an object with more than `count` items before examining any item."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > count:
            sizes = {"max_length": count, "actual_length": len(value)}
            raise PydanticCustomError("too_long", "too many items", sizes)
        return value

    return BeforeValidator(check)


TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Validation stops at the first wrong item, so that refusing a long list is cheap."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(_MAX_METADATA)
]
"""OpenAI's limits for pairs that a client attaches to a request."""


class Body(BaseModel):
    """A JSON object with known fields."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )
    not_supported: ClassVar[Mapping[str, str]] = {}
    """Fields of the API that are rejected, with the remedy for each."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            sizes = {"max_length": _MAX_FIELDS, "actual_length": len(data)}
            raise PydanticCustomError("too_many_fields", "too many fields", sizes)
        return {name: value for name, value in data.items() if value is not None}


class OpenBody(Body):
    """A JSON object whose unknown fields are ignored: a part of a conversation."""

    model_config = ConfigDict(extra="ignore")


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")
    description: str | None = None
    parameters: JsonObject | None = Field(default=None, description="JSON schema of the arguments, of type object")
    strict: bool | None = Field(
        default=None, description="calls follow the schema even with tool_choice auto; forced calls always do"
    )


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Ignored = Field(default=None, description=_FOUND_BY_CONTENT)


class CalledFunction(OpenBody):
    """The function of a call that was made."""

    name: str
    arguments: str = ""


class MadeCall(OpenBody):
    """A call that the assistant made in an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(OpenBody):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(kind := data.get("type"), str) and kind != "text":
            raise PydanticCustomError("unsupported_part", "{kind}", {"kind": kind[:64]})
        return data


class Message(OpenBody):
    """One turn of a conversation."""

    role: str = Field(
        min_length=1, max_length=64, description="system, developer (same as system), user, assistant or tool"
    )
    content: str | Annotated[list[TextPart], Field(fail_fast=True), at_most(_MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MadeCall], Field(fail_fast=True), at_most(_MAX_CALLS)] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The parts of the content, joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class NamedFunction(Body):
    """Name of a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """The tools that the model may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)] = Field(min_length=1, max_length=_MAX_TOOLS)


class AllowedToolsChoice(Body):
    """The model sees all tools, and may call some of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class NamedSchema(Body):
    """A JSON schema for the answer."""

    name: str = "schema"
    description: str | None = None
    schema_: JsonObject | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = Field(default=None, description="accepted without effect: output always follows the schema")


class ResponseFormat(Body):
    """Required form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    whitespace: bool = Field(default=False, description=_WHITESPACE)


class StructuredOutputs(Body):
    """vLLM's form of constraints; exactly one."""

    json_: JsonObject | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True), at_most(_MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace: bool = Field(default=False, description=_WHITESPACE)


CacheRetention = Literal["in_memory", "in-memory", "24h"] | None
CACHE_RETENTION = Field(default=None, description="24h stands for retention_s 86400; in_memory is the default")


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        default=False, description="report the usage so far in every chunk; requires include_usage"
    )
    include_obfuscation: Ignored = Field(default=None, description="accepted without effect: streams are not padded")


class ScheduledBody(Body):
    """Options of the scheduler, in all APIs whose requests wait for a worker."""

    request_id: str | None = Field(default=None, max_length=128)
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        default=0, description="lower values run first, as in vLLM; the negative of the gRPC field"
    )
    cache_salt: str | None = Field(
        default=None, description="requests share cached prefixes only with requests that have the same salt"
    )
    tenant: str | None = None
    request_class: str | None = None
    session_id: str | None = Field(
        default=None, description="name of the session, for example an agent's conversation, that this is a turn of"
    )
    ends_session: bool = Field(
        default=False, description="this is the last turn of the session; the retention by earlier turns ends"
    )
    retention_s: Annotated[float, Field(gt=0, le=MAX_RETENTION_S)] | None = Field(
        default=None, description="time after the end of the request for which its KV is retained"
    )
    retention_priority: Annotated[int, Field(ge=0, le=MAX_RETENTION_PRIORITY)] = Field(
        default=0, description="of retained KV, that with a lower priority is evicted first"
    )
    expected_pause_s: Annotated[float, Field(gt=0, le=MAX_RETENTION_S)] | None = Field(
        default=None, description="expected time from the end of the request to the next turn of its session"
    )
    ttft_target_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = None
    total_time_target_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = None


class QueuedBody(ScheduledBody):
    """Common fields of OpenAI's completions, chat and embeddings."""

    model: str = Field(default="", max_length=256, description="model name; empty for the served model")
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=_MAX_UINT32)] | Literal[-1] | None = Field(
        default=None, description="keep the last N tokens that fit into the context; -1 keeps all that fit"
    )

    @property
    def kept_prompt_tokens(self) -> int | None:
        """The number of tokens to keep; None for all of them, with an error if they do not fit."""
        return MAX_TOKEN_IDS if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens

    user: Ignored = Field(default=None, description="accepted without effect")


_NOT_SUPPORTED = {
    "audio": "remove it; only text is generated",
    "best_of": "generate n choices and rank them yourself",
    "chat_template": "use chat_template_kwargs; templates come with the model",
    "documents": "put documents into the messages",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_decoding_backend": "remove it; the server chooses the backend",
    "length_penalty": "remove it; beam search is not supported",
    "logits_processors": "remove it; requests cannot carry code",
    "mm_processor_kwargs": "remove it; only text is supported",
    "moderation": "remove it; the server does not classify content",
    "modalities": "remove it; only text is supported",
    "prediction": "remove it; predicted outputs are not supported",
    "suffix": "remove it; fill-in-the-middle is not supported",
    "use_beam_search": "use n to sample several choices",
    "verbosity": "state the wanted length in the prompt",
    "web_search_options": "remove it; web search is not supported",
}
"""Fields of OpenAI's and vLLM's completions and chat that are rejected, with the remedy for each."""


class SamplingOptions(Body):
    """Sampling and the end of the output, in OpenAI's APIs, with vLLM's extensions."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=0x7FFFFFFF)] | None = Field(default=None, description="-1, 0: no limit")
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True), at_most(MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[TokenIds, at_most(MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Uint32 | None = None
    skip_special_tokens: bool = True


class SamplingBody(QueuedBody, SamplingOptions):
    """Common fields of completions and chat."""

    not_supported = _NOT_SUPPORTED

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Uint32 | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    logit_bias: Annotated[dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float], at_most(MAX_BIASES)] | None = (
        None
    )
    allowed_token_ids: Annotated[TokenIds, at_most(MAX_TOKEN_SET)] | None = Field(default=None, min_length=1)
    banned_token_ids: Annotated[TokenIds, at_most(MAX_TOKEN_SET)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True), at_most(MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Uint32 | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = Field(
        default=False, description='write tokens in log-probabilities as "token_id:7"'
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True), at_most(_MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    expected_output_tokens: Uint32 | None = None
    store: Ignored = Field(default=None, description="accepted without effect")
    metadata: Metadata | None = Field(default=None, description="accepted without effect")
    service_tier: Ignored = Field(default=None, description="accepted without effect")
    safety_identifier: Ignored = Field(default=None, description="accepted without effect")
    prompt_cache_key: Ignored = Field(default=None, description=_FOUND_BY_CONTENT)
    prompt_cache_options: Ignored = Field(default=None, description=_FOUND_BY_CONTENT)
    prompt_cache_retention: CacheRetention = CACHE_RETENTION
    spaces_between_special_tokens: Ignored = Field(default=None, description="accepted without effect")


class CompletionBody(SamplingBody):
    """One or several prompts to continue."""

    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=_MAX_PROMPTS)]
    ) = Field(description="text, token ids, or up to 256 of either")
    echo: bool = False
    logprobs: Uint32 | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="must equal n: choices are not ranked"
    )


class ChatBody(SamplingBody):
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Uint32 | None = None
    logprobs: bool = False
    top_logprobs: Uint32 | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = Field(default=None, description="passed to the chat template as a variable")


class EmbeddingBody(QueuedBody):
    """One or several texts to embed."""

    input: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)
        ]
    ) = Field(description="text, token ids, or up to 2048 of either")
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64: encoded little-endian float32 values, as in OpenAI's API"
    )
    dimensions: Annotated[int, Field(ge=1, le=_MAX_UINT32)] | None = Field(
        default=None, description="must equal the embedding size of the model: shortened embeddings are not supported"
    )
    pooling: Literal["last", "mean"] = Field(
        default="last", description="last: the hidden state of the last token; mean: the mean over all tokens"
    )
    normalize: bool = Field(default=True, description="scale vectors to length 1")


class PoolingBody(EmbeddingBody):
    """One or several texts to embed, in vLLM's form for models that pool."""

    task: Literal["embed"] | None = Field(default=None, description="the only one: one vector per text")


class TokenizeBody(Body):
    """Text or a conversation to tokenize."""

    model: str = Field(default="", max_length=256)
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES
    )
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(default=None, max_length=_MAX_TOOLS)
    chat_template_kwargs: JsonObject | None = None


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    model: str = Field(default="", max_length=256)
    tokens: TokenIds
