"""Values that the Python clients take and return: frozen dataclasses, the same for `Client` and `AsyncClient`.

They mirror the public proto in Python's terms: durations are seconds, columns are tuples, absent values are None.
`quire._requests` converts them to messages, and `quire._responses` converts messages to them.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from quire import errors

Message = Mapping[str, Any]
"""One message of a conversation: {"role": "user", "content": "…"}.

Further keys are "name", "tool_calls" (a list, in OpenAI's form) and "tool_call_id".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """Scheduling options for a request; the server's policy decides which of them matter. Defaults are not sent."""

    priority: int = 0
    """Priority in [-100, 100]; higher runs first."""
    tenant: str = ""
    """Tenant to which the request is charged."""
    expected_output_tokens: int | None = None
    """Expected number of generated tokens; by default the server's own estimate."""
    ttft_target_s: float | None = None
    """Target for the time to first token, seconds."""
    total_time_target_s: float | None = None
    """Target for the time to the last token, seconds. Unlike `timeout`, a missed target does not end the request."""
    cache_scope: str = ""
    """Scope for cached prompt prefixes; the request shares them only with requests in the same scope."""
    request_class: str = ""
    """Request class configured on the server, which has its own queue order."""
    session_id: str = ""
    """Name of the session that the request is a turn of, such as an agent's conversation. By default, the server
    recognises a request that extends the whole sequence of an earlier one.
    """
    ends_session: bool = False
    """Whether this is the last turn of the session."""
    retention_s: float | None = None
    """Time after the end of the request for which the server retains its KV, seconds; at most a day."""
    retention_priority: int = 0
    """Priority of the retained KV, in [0, 9]; KV with a lower priority is evicted first."""
    expected_pause_s: float | None = None
    """Expected time from the end of the request to the next turn of its session, seconds; at most a day."""


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`, except the prompt as text. Absent options take the server's default."""

    messages: Sequence[Message]
    """Conversation that replaces the text; the server renders it with the model's chat template."""
    token_ids: Sequence[int]
    """Token ids to use instead of the text, without changes."""
    model: str
    """Name of the model; by default the served model."""
    max_tokens: int
    """Maximum number of generated tokens."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_k: int
    """Sample from the k most likely tokens; 0 for all."""
    top_p: float
    """Sample from the smallest set of tokens whose total probability reaches p."""
    min_p: float
    """Drop tokens less likely than min_p times the most likely one."""
    seed: int
    """Seed for random sampling; equal requests with equal seeds use the same noise."""
    stop: str | Sequence[str]
    """Stop strings: generation ends when one of them appears. The text does not include the stop string."""
    stop_token_ids: Sequence[int]
    """Stop tokens: generation ends after one of them."""
    ignore_eos: bool
    """Continue after the model's end-of-sequence token."""
    n: int
    """Number of choices."""
    typical_p: float
    """Typical sampling: keep tokens whose information is closest to the entropy, up to this total probability."""
    repetition_penalty: float
    """Divides positive logits, and multiplies negative ones, for tokens in the prompt or output; 1 for no penalty."""
    presence_penalty: float
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float
    """Subtracted from the logits of tokens in the output, once per occurrence."""
    logit_bias: Mapping[int, float]
    """Values added to the logits of individual tokens, by token id."""
    allowed_token_ids: Sequence[int]
    """Only these tokens may be sampled."""
    banned_token_ids: Sequence[int]
    """These tokens are never sampled."""
    bad_words: Sequence[str]
    """These words are never completed."""
    min_tokens: int
    """Minimum number of generated tokens before a stop condition applies."""
    include_stop_string: bool
    """Whether the text includes the stop string."""
    logprobs: int
    """Number of most likely tokens to return log-probabilities for, in addition to each generated token itself."""
    prompt_logprobs: int
    """Number of most likely tokens to return log-probabilities for, in addition to each prompt token itself."""
    echo: bool
    """Return the prompt too, in `prompt` of the generation."""
    truncate_prompt_tokens: int
    """Keep only this many last tokens of the prompt."""
    tools: Sequence[Mapping[str, Any]]
    """With `messages`: the tools that the model may call, in OpenAI's form."""
    tool_choice: str
    """With `tools`: "auto" (default), "none", "required", or the name of the function that must be called."""
    parallel_tool_calls: bool
    """Whether an answer may have several tool calls, if a grammar constrains the calls; by default True."""
    parse: bool
    """Whether the server separates reasoning and tool calls from the text; by default True with `messages`.

    If False, the text is the unmodified output of the model.
    """
    template_variables: Mapping[str, Any]
    """With `messages`: additional variables for the chat template."""
    continue_final_message: bool
    """With `messages`: continue the last message instead of responding to it."""
    json_schema: str | Mapping[str, Any] | bool
    """JSON schema to which the output conforms; True allows any JSON object."""
    regex: str
    """The output matches this regular expression."""
    ebnf: str
    """The output conforms to this grammar, in Lark's or GBNF's notation."""
    choice: Sequence[str]
    """The output is one of these strings."""
    include_special_tokens: bool
    """Include special tokens in the text."""
    resumable: bool
    """Resume automatically after a lost connection; the output equals that of an uninterrupted run.

    The server keeps the request for some minutes, during which its id stays in use.
    """
    request_id: str
    """Id of the request; by default chosen by the server."""
    scheduling: SchedulingOptions
    """Scheduling options."""


class FinishReason(enum.Enum):
    """Reason for the end of generation."""

    STOP = "stop"
    """The model's end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the end of the model's context."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability."""

    token_id: int
    logprob: float
    rank: int
    """Rank among all tokens by probability, from 1."""
    bytes: bytes
    """The token's bytes, which may be only a part of a character."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities at one position."""

    token: ScoredToken
    """The token at this position."""
    top: tuple[ScoredToken, ...]
    """The most likely tokens at this position."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of a tool call."""

    index: int
    """Number of the call within its choice, from 0."""
    id: str = ""
    """Id of the call; only in the delta that starts the call."""
    name: str = ""
    """Name of the function; only where the call begins."""
    arguments: str = ""
    """The next part of the arguments, as JSON text."""
    complete: bool = False
    """Whether the call is complete."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call."""

    id: str
    name: str
    arguments: str
    """The arguments as JSON text."""
    complete: bool
    """Whether the call is complete; False if the output ended before the call did."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of the output. A delta never ends within a character. Its text may come from earlier tokens."""

    choice: int
    first_index: int
    """Index of the first of these tokens within the choice."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if requested."""
    reasoning: str = ""
    """Reasoning text, which the model writes before the answer."""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt as the model saw it, if requested."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    """One entry per token, if requested; the first has no log-probability."""


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """End of one choice."""

    choice: int
    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token usage of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    """Number of times that the request was preempted, because of memory or a lost worker, and later continued."""
    energy_j: float = 0.0
    """Energy that the request's share of its steps used, joules; 0 if the server does not measure energy."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in seconds since the request's arrival, measured by the server."""

    queued_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a generation."""

    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    timings: Timings
    request_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: ChoiceFinished
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to the conversation before the results of its tool calls."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete answer. With n > 1, text, tokens and log-probabilities are those of the first choice."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()
    choices: tuple[Choice, ...] = ()
    """All choices, in order."""
    prompt: Prompt | None = None
    """The prompt, if `echo` or `prompt_logprobs` is set."""

    @property
    def reasoning(self) -> str:
        """Reasoning text that the model wrote before the answer."""
        return self.choices[0].reasoning if self.choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls if self.choices else ()

    @property
    def message(self) -> dict[str, Any]:
        """The first choice as a message, to be appended to the conversation."""
        return self.choices[0].message if self.choices else {"role": "assistant", "content": self.text}


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Answer to one request of a batch."""

    index: int
    """Index of the request in the batch."""
    completion: Completion | None
    error: errors.QuireError | None
    """The error if there is no completion."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embedding vectors for prompts."""

    vectors: tuple[tuple[float, ...], ...]
    """One vector per prompt, in order."""
    usage: Usage
    request_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Token ids of a prompt, and the model's maximum length."""

    token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Model:
    """Description of a served model."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    has_chat_template: bool
    fingerprint: str
    embedding_size: int = 0
    """Number of elements in an embedding; 0 if the model provides no embeddings."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Defaults for sampling options that a request does not set, and the limit `max_new_tokens`, by name."""
