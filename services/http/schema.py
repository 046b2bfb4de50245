"""What HTTP requests may hold: OpenAI's fields, those that vLLM adds, and a few of our own.

Types and what can be said field by field are checked here; ranges that gRPC clients meet as well are checked where
theirs are. A field that is null counts as absent. A field that is not listed is refused, because a misspelt option that
is ignored costs its sender more than an error. Fields that are *accepted without effect* belong to the API and change
nothing here.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from services.chat import MAX_MESSAGES
from services.embeddings import MAX_INPUTS

_MAX_PROMPTS = 256
_MAX_UINT32 = 0xFFFFFFFF

Uint32 = Annotated[int, Field(ge=0, le=_MAX_UINT32)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_UINT32)]
JsonObject = dict[str, JsonValue]


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

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: JsonObject | None = Field(default=None, description="JSON schema of the arguments, an object's")
    strict: bool | None = Field(
        default=None, description="accepted without effect: forced calls always follow the schema"
    )


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class CalledFunction(Body):
    """The function of a call that was made."""

    name: str
    arguments: str = ""


class MadeCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: str = Field(min_length=1, max_length=64, description="system, developer (the same), user, assistant or tool")
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    refusal: JsonValue = Field(default=None, description="accepted without effect")
    annotations: JsonValue = Field(default=None, description="accepted without effect")


class NamedFunction(Body):
    """A function by name."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Body):
    """A JSON schema for the answer."""

    name: str = "schema"
    description: str | None = None
    schema_: JsonObject | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = Field(default=None, description="accepted without effect: answers always follow the schema")


class ResponseFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """vLLM's form of constraints; exactly one."""

    json_: JsonObject | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(Body):
    """What a stream carries beside the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="usage in every chunk")


class QueuedBody(Body):
    """What all requests that a worker computes have in common."""

    model: str = Field(default="", max_length=256, description="empty: the model that is served")
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=_MAX_UINT32)] | None = None
    request_id: str | None = Field(default=None, max_length=128)
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        default=0, description="lower runs first, as in vLLM: the negative of gRPC's"
    )
    cache_salt: str | None = Field(
        default=None, description="requests share cached prefixes with those of the same salt only"
    )
    tenant: str | None = None
    request_class: str | None = None
    ttft_target_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = None
    total_time_target_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = None
    user: JsonValue = Field(default=None, description="accepted without effect")


class SamplingBody(QueuedBody):
    """What completions and chat have in common."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Uint32 | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=0x7FFFFFFF)] | None = Field(default=None, description="-1 and 0: all tokens")
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    banned_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Uint32 | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: Uint32 | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = Field(default=False, description='tokens in log-probabilities read "token_id:7"')
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    expected_output_tokens: Uint32 | None = None
    store: JsonValue = Field(default=None, description="accepted without effect")
    metadata: JsonValue = Field(default=None, description="accepted without effect")
    service_tier: JsonValue = Field(default=None, description="accepted without effect")
    safety_identifier: JsonValue = Field(default=None, description="accepted without effect")
    prompt_cache_key: JsonValue = Field(
        default=None, description="accepted without effect: prefixes are found by content"
    )
    spaces_between_special_tokens: JsonValue = Field(default=None, description="accepted without effect")


class CompletionBody(SamplingBody):
    """A prompt to continue, or several."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=_MAX_PROMPTS)]
    ) = Field(description="text, token ids, or up to 256 of either")
    echo: bool = False
    logprobs: Uint32 | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="only n itself: nothing is ranked"
    )

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is all that is to come back, as evaluations want it for its log-probabilities."""
        return self.echo and self.max_tokens == 0


class ChatBody(SamplingBody):
    """A conversation to continue."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Uint32 | None = None
    logprobs: bool = False
    top_logprobs: Uint32 | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = Field(default=None, description="a variable of the chat template")


class EmbeddingBody(QueuedBody):
    """A text to turn into a vector, or several."""

    input: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_INPUTS)]
    ) = Field(description="text, token ids, or up to 2048 of either")
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64: of little-endian float32, as OpenAI's own"
    )
    dimensions: Annotated[int, Field(ge=1, le=_MAX_UINT32)] | None = Field(
        default=None, description="only the model's own number: cutting needs a model that was trained for it"
    )
    pooling: Literal["last", "mean"] = Field(
        default="last", description="the last hidden state of the last token, or the mean over all tokens"
    )
    normalize: bool = Field(default=True, description="scale vectors to length 1")


class TokenizeBody(Body):
    """Text or a conversation to tokenize."""

    model: str = Field(default="", max_length=256)
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[Tool] | None = Field(default=None, max_length=128)
    chat_template_kwargs: JsonObject | None = None


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    model: str = Field(default="", max_length=256)
    tokens: list[TokenId]


NOT_SUPPORTED = {
    "audio": "audio is not generated",
    "best_of": "nothing is ranked; give n",
    "chat_template": "templates come with the model; give chat_template_kwargs",
    "documents": "put documents into the messages",
    "function_call": "give tool_choice",
    "functions": "give tools",
    "guided_decoding_backend": "the server chooses",
    "length_penalty": "there is no beam search",
    "logits_processors": "code is not taken from requests",
    "mm_processor_kwargs": "only text is served",
    "modalities": "only text is served",
    "prediction": "there is no predicted output",
    "suffix": "the model does not fill in between",
    "use_beam_search": "there is no beam search; sample with n",
    "verbosity": "say it in the prompt",
    "web_search_options": "there is no search",
}
"""Fields of OpenAI's and vLLM's APIs that are refused, and what to do instead."""
