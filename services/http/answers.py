"""Converts the generator's messages to OpenAI's chunks.

An `Answer` belongs to one HTTP request with any number of prompts and choices. It converts every message from every
stream to chunks. For non-streaming requests, a `WholeAnswer` joins all chunks.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from quire import __version__
from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT
from services.access.shares import Slices
from services.http.logprobs import Logprobs, TextOffsets, joined_steps, prompt_logprobs
from services.http.schema import StreamOptions

SYSTEM_FINGERPRINT = f"quire-{__version__}"
"""Shows clients that results may differ after an upgrade, even with the same seed."""

Json = dict[str, Any]
"""A JSON object in a response, as described in `openapi`."""


class UsageAnswer(TypedDict):
    """Token usage of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[dict[str, int]]
    energy_j: NotRequired[float]
    """Joules; absent if the service does not measure energy."""


@dataclass(slots=True)
class PromptUsage:
    """Current token usage of one prompt with all its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens read from the prefix cache; None while any choice of the prompt is running."""
    energy_j: float = 0.0
    """Energy of the prompt with its choices, J; 0 if not known."""


@dataclass(slots=True)
class ReadPrompt:
    """Fields with the log-probabilities of a prompt."""

    echo: Json = field(default_factory=dict)
    scores: Json = field(default_factory=dict)


@dataclass(slots=True)
class ChoiceState:
    """State of one choice."""

    index: int
    role_sent: bool = False
    called: bool = False
    ended: bool = False
    offsets: TextOffsets | None = None
    """Text offsets of the tokens, if log-probabilities are requested."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """Builds the response to one HTTP request.

    Args:
        chat: chat messages instead of texts.
        id: id of the answer.
        model: name of the model.
        n: choices per prompt.
        prompts: number of prompts.
        logprobs: format of log-probabilities; None for none.
        prompt_logprobs: whether log-probabilities of the prompt are requested separately.
        echo: the prompt is part of the text.
        return_token_ids: return token ids in addition to texts.
        options: options of a stream.
    """

    chat: bool
    id: str
    model: str
    n: int
    prompts: int
    logprobs: Logprobs | None = None
    prompt_logprobs: bool = False
    echo: bool = False
    return_token_ids: bool = False
    options: StreamOptions = field(default_factory=StreamOptions)
    created: int = field(default_factory=lambda: int(time.time()))
    _choices: dict[int, ChoiceState] = field(default_factory=dict)
    _usage: list[PromptUsage] = field(init=False)
    _read: list[ReadPrompt] = field(init=False)

    def __post_init__(self) -> None:
        self._usage = [PromptUsage() for _ in range(self.prompts)]
        self._read = [ReadPrompt() for _ in range(self.prompts)]

    @property
    def object(self) -> str:
        """Value of the field `object` in a chunk."""
        return "chat.completion.chunk" if self.chat else "text_completion"

    def events(self, prompt: int, response: v1.GenerateResponse) -> Iterator[Json]:
        """Yield the chunks for a message of one prompt's stream."""
        match response.WhichOneof("event"):
            case "delta":
                yield from self._delta(prompt, response.delta)
            case "prompt":
                yield from self._prompt(prompt, response.prompt)
            case "choice_finished":
                yield from self._end(prompt, response.choice_finished.choice, response.choice_finished)
            case "finished":
                finished = response.finished
                usage = finished.usage
                self._usage[prompt] = PromptUsage(
                    usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens, usage.energy_j
                )
                yield from self._end(prompt, 0, finished)

    async def read_prompt(self, prompt: int, event: v1.Prompt, slices: Slices) -> None:
        """Read the log-probabilities of a prompt in slices, because there may be very many; call before `events`."""
        read, principal = self._read[prompt], CURRENT.get().name
        if self.echo and self.logprobs is not None and event.logprobs:
            read.echo["logprobs"] = joined_steps(await slices.run(principal, self.logprobs.echo_steps(event)))
        if self.prompt_logprobs:
            read.scores["prompt_logprobs"] = await slices.run(principal, prompt_logprobs(event))

    def begin_prompt(self, prompt: int, token_ids: Sequence[int]) -> None:
        """Record the tokens of a prompt."""
        self._usage[prompt].prompt_tokens = len(token_ids)

    def usage(self) -> UsageAnswer:
        """Return the usage so far of all prompts and choices. Cached tokens are known only at the end."""
        prompt = sum(each.prompt_tokens for each in self._usage)
        completed = sum(each.completion_tokens for each in self._usage)
        usage = UsageAnswer(prompt_tokens=prompt, completion_tokens=completed, total_tokens=prompt + completed)
        cached = [each.cached_tokens for each in self._usage if each.cached_tokens is not None]
        if len(cached) == len(self._usage):
            usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
        if energy := sum(each.energy_j for each in self._usage):
            usage["energy_j"] = energy
        return usage

    def last(self) -> list[Json]:
        """Return the last chunk of a stream that includes usage."""
        return [{**self._head(), "choices": [], "usage": self.usage()}] if self.options.include_usage else []

    def _head(self) -> Json:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head(), "choices": [choice]}
        if self.options.include_usage:
            chunk["usage"] = self.usage() if self.options.continuous_usage_stats else None
        return chunk

    def _choice(self, prompt: int, choice: int) -> ChoiceState:
        index = prompt * self.n + choice
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = ChoiceState(index)
        return state

    # Beginning

    def _prompt(self, prompt: int, event: v1.Prompt) -> Iterator[Json]:
        for number in range(self.n):
            state = self._choice(prompt, number)
            choice: Json = {"index": state.index, "finish_reason": None}
            if self.echo:
                choice["text"] = event.text
                if self.logprobs is not None:
                    state.offsets = self.logprobs.offsets(len(event.text))
                    choice |= self._read[prompt].echo
            else:
                choice |= {"delta": {"role": "assistant", "content": ""}} if self.chat else {"text": ""}
                state.role_sent = self.chat
            if self.return_token_ids:
                choice["prompt_token_ids"] = list(event.token_ids)
            choice |= self._read[prompt].scores
            yield self._chunk(choice)

    # Middle

    def _delta(self, prompt: int, delta: v1.Delta) -> Iterator[Json]:
        state = self._choice(prompt, delta.choice)
        self._usage[prompt].completion_tokens += len(delta.token_ids)
        logprobs = self._logprobs(state, delta)
        token_ids = list(delta.token_ids) if self.return_token_ids else None
        if not self.chat:
            choice: Json = {"index": state.index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
            if token_ids is not None:
                choice["token_ids"] = token_ids
            yield self._chunk(choice)
            return
        contents = self._noted(state, [*_contents_of(delta.parts)])
        if not contents and (logprobs or token_ids is not None):
            contents = [{}]
        for content in contents:
            choice = {"index": state.index, "delta": content, "logprobs": logprobs, "finish_reason": None}
            if token_ids is not None:
                choice["token_ids"], token_ids = token_ids, None
            logprobs = None
            yield self._chunk(choice)

    @staticmethod
    def _noted(state: ChoiceState, contents: list[Json]) -> list[Json]:
        """Record the contents in their choice's state, and add the role to the first content of each choice."""
        state.called = state.called or any("tool_calls" in content for content in contents)
        if contents and not state.role_sent:
            state.role_sent = True
            contents[0] = {"role": "assistant", "content": "", **contents[0]}
        return contents

    def _logprobs(self, state: ChoiceState, delta: v1.Delta) -> Json | None:
        if self.logprobs is None or not delta.logprobs:
            return None
        if self.chat:
            return self.logprobs.of_chat(delta.logprobs)
        if state.offsets is None:
            state.offsets = self.logprobs.offsets()
        return self.logprobs.of_text(delta.logprobs, state.offsets.of(delta.token_ids))

    # End

    def _end(self, prompt: int, number: int, end: v1.ChoiceFinished | v1.Finished) -> Iterator[Json]:
        state = self._choice(prompt, number)
        if state.ended:
            return
        state.ended = True
        content = {} if not self.chat or state.role_sent else {"role": "assistant", "content": ""}
        reason = "length" if end.reason == v1.FINISH_REASON_LENGTH else "stop"
        choice: Json = {
            "index": state.index,
            "logprobs": None,
            "finish_reason": "tool_calls" if state.called and reason == "stop" else reason,
            "stop_reason": _stop_reason(end),
        }
        choice |= {"delta": content} if self.chat else {"text": ""}
        yield self._chunk(choice)


def _contents_of(parts: Iterable[v1.OutputPart]) -> Iterator[Json]:
    """Yield the contents in deltas. The end of a tool call has no content."""
    for part in parts:
        match part.WhichOneof("kind"):
            case "content":
                yield {"content": part.content}
            case "reasoning":
                yield {"reasoning_content": part.reasoning}
            case "call_begun":
                begun = part.call_begun
                call = {"id": begun.id, "type": "function", "function": {"name": begun.name, "arguments": ""}}
                yield {"tool_calls": [{"index": begun.index, **call}]}
            case "call_arguments":
                more = part.call_arguments
                yield {"tool_calls": [{"index": more.index, "function": {"arguments": more.text}}]}


def _stop_reason(end: v1.ChoiceFinished | v1.Finished) -> str | int | None:
    match end.WhichOneof("stop"):
        case "stop_string":
            return end.stop_string
        case "stop_token_id":
            return end.stop_token_id
    return None
