"""The values that the Python client takes and gives: plain, frozen, and the same for `Client` and
`AsyncClient`.

They carry what the public proto carries, in Python's terms: durations are seconds, columns are tuples, what
is absent is None. How they become messages is `quire._requests`' business, how they come from messages that of
`quire._responses`.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from quire import errors

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "user", "content": "…"}; further keys are "name", "tool_calls" (a list, in
OpenAI's form) and "tool_call_id"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """How a request is treated in the server's queue; which of these matter depends on the server's policy.
    What is left at its default is not sent."""

    priority: int = 0
    """Higher runs first, in [-100, 100]."""
    tenant: str = ""
    """The tenant to account to."""
    expected_output_tokens: int | None = None
    """How many tokens will probably be generated; learned by the server otherwise."""
    ttft_target_s: float | None = None
    """Wanted time until the first token, seconds."""
    total_time_target_s: float | None = None
    """Wanted time until the last token, seconds. Unlike `timeout`, missing it ends nothing."""
    cache_scope: str = ""
    """The request shares cached prompt prefixes with those of the same scope only."""
    request_class: str = ""
    """Requests of one class wait in an order of their own, where the server's operator has configured the class."""


class GenerateOptions(TypedDict, total=False):
    """Everything that `generate` takes beside the prompt as text. What is left out takes the server's
    default."""

    messages: Sequence[Message]
    """A conversation in place of the text; the server renders it with the model's chat template."""
    token_ids: Sequence[int]
    """Token ids in place of the text, used as they are."""
    model: str
    """The model's name; by default the one that is served."""
    max_tokens: int
    """Most tokens to generate."""
    temperature: float
    """0 is greedy."""
    top_k: int
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float
    """Keep the smallest set of tokens whose probability reaches p."""
    min_p: float
    """Drop tokens less likely than min_p times the most likely one."""
    seed: int
    """Two runs of one request with one seed draw the same noise."""
    stop: str | Sequence[str]
    """Generation ends where one of these strings appears; the string is not part of the text."""
    stop_token_ids: Sequence[int]
    """Generation ends after one of these tokens."""
    ignore_eos: bool
    """Go on after the model's end-of-sequence token."""
    n: int
    """Number of independent answers."""
    typical_p: float
    """Keep the tokens whose information is nearest to the distribution's entropy until their probability reaches p."""
    repetition_penalty: float
    """Divides the logits of tokens that prompt or output hold; 1 is none."""
    presence_penalty: float
    """Subtracted from the logits of tokens that the output holds."""
    frequency_penalty: float
    """The same for each time the output holds them."""
    logit_bias: Mapping[int, float]
    """Added to the logits of single tokens."""
    allowed_token_ids: Sequence[int]
    """Only these tokens may be chosen."""
    banned_token_ids: Sequence[int]
    """These tokens are never chosen."""
    bad_words: Sequence[str]
    """These words are never completed."""
    min_tokens: int
    """Fewest tokens before an end is accepted."""
    include_stop_string: bool
    """Keep the stop string in the text."""
    logprobs: int
    """Log-probabilities of the generated tokens, and of so many most likely ones at each position."""
    prompt_logprobs: int
    """The same for the prompt."""
    echo: bool
    """Send the prompt, too: `prompt` of the generation."""
    truncate_prompt_tokens: int
    """Keep only the last so many tokens of the prompt."""
    tools: Sequence[Mapping[str, Any]]
    """With `messages`: the tools that the model may call, in OpenAI's form."""
    template_variables: Mapping[str, Any]
    """With `messages`: further variables of the chat template."""
    continue_final_message: bool
    """With `messages`: the last one is a beginning that the model is to continue."""
    json_schema: str | Mapping[str, Any] | bool
    """The output conforms to this JSON schema; True: it is any JSON object."""
    regex: str
    """The output matches this regular expression."""
    ebnf: str
    """The output conforms to this grammar, in Lark's or GBNF's notation."""
    choice: Sequence[str]
    """The output is one of these."""
    include_special_tokens: bool
    """Write special tokens into the text."""
    resumable: bool
    """Go on after a lost connection, by itself, with exactly the answer of an undisturbed run. The server keeps what it
    has for some minutes, and the request's id is taken for as long."""
    request_id: str
    """Chosen by the caller; drawn by the server otherwise."""
    scheduling: SchedulingOptions
    """How the request is treated in the queue."""


class FinishReason(enum.Enum):
    """Why generation ended."""

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
    """Its place among all tokens by probability, from 1."""
    bytes: bytes
    """What it stands for by itself."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities at one position."""

    token: ScoredToken
    """The token that is there."""
    top: tuple[ScoredToken, ...]
    """The most likely ones."""


@dataclass(frozen=True, slots=True)
class Delta:
    """More output. A delta never ends inside a character; its text may belong to earlier tokens that were
    held back."""

    choice: int
    first_index: int
    """Index of the first of these tokens within the answer."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt as the model saw it, if it was asked for."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, if they were asked for; the first has no log-probability."""


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """How one of several answers ended."""

    choice: int
    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request consumed."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    """How often the request was paused for lack of memory or a lost worker, and later continued."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds since the request arrived, measured by the server."""

    queued_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """How a generation ended."""

    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    timings: Timings
    request_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several answers."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: ChoiceFinished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. With n > 1, text, tokens and log-probabilities are those of the first choice."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()
    choices: tuple[Choice, ...] = ()
    """All answers, in order; with n = 1 there is one."""
    prompt: Prompt | None = None
    """The prompt, if `echo` or `prompt_logprobs` asked for it."""


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What became of one request of a batch."""

    index: int
    """Its place in the batch."""
    completion: Completion | None
    error: errors.QuireError | None
    """Why there is no completion."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of prompts."""

    vectors: tuple[tuple[float, ...], ...]
    """One for each prompt, in order."""
    usage: Usage
    request_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a prompt, and how long a sequence the model takes."""

    token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    has_chat_template: bool
    fingerprint: str
    embedding_size: int = 0
    """Elements of the vectors that `embed` gives; 0: the model makes none."""
