"""From what the generator sends to OpenAI's objects, piece by piece or as a whole.

An `Answer` belongs to one HTTP request, whatever the number of its prompts and choices; it takes in every message of
every stream and gives the chunks that come of it. A whole answer is the sum of its chunks, so that both forms cannot
differ.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from quire.v1 import generation_pb2 as v1
from services.http.schema import StreamOptions
from services.http.tool_calls import AnswerParser, CallArguments, CallBegun, Content, Piece

Json = dict[str, Any]
"""An object of the answer. What is in it is described by the TypedDicts of `openapi`."""


class UsageAnswer(TypedDict):
    """What a request consumed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[dict[str, int]]


@dataclass(slots=True)
class ChoiceState:
    """One choice on its way."""

    index: int
    parser: AnswerParser | None
    role_sent: bool = False
    called: bool = False
    ended: bool = False
    tokens: int = 0
    text_length: int = 0


@dataclass(slots=True, kw_only=True)
class Answer:
    """The answer to one HTTP request.

    Args:
        chat: messages instead of texts.
        id: the answer's id.
        model: name of the model.
        n: choices per prompt.
        prompts: number of prompts.
        parsers: makes a parser for each choice, if there may be calls.
        top_logprobs: alternatives per token, None for no log-probabilities.
        prompt_logprobs: whether those of the prompt were asked for by themselves.
        token_bytes: what a token stands for.
        echo: the prompt is part of the text.
        only_prompt: it is all of it; what was generated is not shown.
        return_token_ids: token ids beside texts.
        tokens_as_ids: tokens in log-probabilities are called by their ids.
        options: what a stream carries beside the answer.
    """

    chat: bool
    id: str
    model: str
    n: int
    prompts: int
    parsers: Callable[[], AnswerParser] | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    token_bytes: Callable[[int], bytes]
    echo: bool = False
    only_prompt: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    options: StreamOptions = field(default_factory=StreamOptions)
    created: int = field(default_factory=lambda: int(time.time()))
    _choices: dict[int, ChoiceState] = field(default_factory=dict)
    _prompt_tokens: list[int] = field(init=False)
    _completion_tokens: list[int] = field(init=False)
    _cached_tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._prompt_tokens, self._completion_tokens, self._cached_tokens = ([0] * self.prompts for _ in range(3))

    @property
    def object(self) -> str:
        """What a chunk is called."""
        return "chat.completion.chunk" if self.chat else "text_completion"

    def chunks(self, prompt: int, response: v1.GenerateResponse) -> Iterator[Json]:
        """The chunks that a message of the stream of one prompt becomes."""
        match response.WhichOneof("event"):
            case "delta":
                if not self.only_prompt:
                    yield from self._delta(prompt, response.delta)
            case "prompt":
                yield from self._prompt(prompt, response.prompt)
            case "choice_finished":
                yield from self._end(prompt, response.choice_finished.choice, response.choice_finished)
            case "finished":
                finished = response.finished
                usage = finished.usage
                self._prompt_tokens[prompt] = usage.prompt_tokens
                self._completion_tokens[prompt] = 0 if self.only_prompt else usage.completion_tokens
                self._cached_tokens[prompt] = usage.cached_prompt_tokens
                yield from self._end(prompt, 0, finished)

    def usage(self) -> UsageAnswer:
        """What was consumed so far."""
        completed = sum(self._completion_tokens) or sum(choice.tokens for choice in self._choices.values())
        prompt = sum(self._prompt_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completed,
            "total_tokens": prompt + completed,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }

    def usage_chunk(self) -> Json:
        """The last chunk of a stream that was asked for usage."""
        return {**self._head(), "choices": [], "usage": self.usage()}

    def _head(self) -> Json:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head(), "choices": [choice]}
        if self.options.include_usage:
            chunk["usage"] = self.usage() if self.options.continuous_usage_stats else None
        return chunk

    def _choice(self, prompt: int, choice: int) -> ChoiceState:
        index = prompt * self.n + choice
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = ChoiceState(index, self.parsers() if self.parsers else None)
        return state

    # Beginning

    def _prompt(self, prompt: int, event: v1.Prompt) -> Iterator[Json]:
        for number in range(self.n):
            state = self._choice(prompt, number)
            choice: Json = {"index": state.index, "finish_reason": None}
            if self.echo:
                choice["text"] = event.text
                state.text_length = len(event.text)
                if self.top_logprobs is not None and event.logprobs:
                    choice["logprobs"] = self._text_logprobs(_complete(event, self.token_bytes), 0)
            else:
                choice |= self._content("") if self.chat else {"text": ""}
                if self.chat:
                    state.role_sent = True
            if self.return_token_ids:
                choice["prompt_token_ids"] = list(event.token_ids)
            if self.prompt_logprobs:
                choice["prompt_logprobs"] = [_prompt_logprob(each) for each in event.logprobs]
            yield self._chunk(choice)

    # Middle

    def _delta(self, prompt: int, delta: v1.Delta) -> Iterator[Json]:
        state = self._choice(prompt, delta.choice)
        state.tokens += len(delta.token_ids)
        logprobs = self._logprobs(state, delta)
        token_ids = list(delta.token_ids) if self.return_token_ids else None
        if not self.chat:
            choice: Json = {"index": state.index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
            if token_ids is not None:
                choice["token_ids"] = token_ids
            state.text_length += len(delta.text)
            yield self._chunk(choice)
            return
        contents = self._contents(state, delta.text)
        if not contents and (logprobs or token_ids is not None):
            contents = [{}]
        for content in contents:
            choice = {"index": state.index, "delta": content, "logprobs": logprobs, "finish_reason": None}
            if token_ids is not None:
                choice["token_ids"], token_ids = token_ids, None
            logprobs = None
            yield self._chunk(choice)

    def _contents(self, state: ChoiceState, text: str) -> list[Json]:
        """What the deltas of a message hold."""
        if state.parser is None:
            contents = [{"content": text}] if text else []
        else:
            contents = [_content_of(piece) for piece in state.parser.push(text)]
            state.called = state.called or any("tool_calls" in content for content in contents)
        if contents and not state.role_sent:
            state.role_sent = True
            contents[0] = {"role": "assistant", "content": "", **contents[0]}
        return contents

    # End

    def _end(self, prompt: int, number: int, end: v1.ChoiceFinished | v1.Finished) -> Iterator[Json]:
        state = self._choice(prompt, number)
        if state.ended:
            return
        state.ended = True
        content: Json = {}
        if self.chat and not state.role_sent:
            content = {"role": "assistant", "content": ""}
        for piece in state.parser.finish() if state.parser else ():
            last = _content_of(piece)
            state.called = state.called or "tool_calls" in last
            content = {**content, **last}
        reason = "length" if self.only_prompt or end.reason == v1.FINISH_REASON_LENGTH else "stop"
        choice: Json = {
            "index": state.index,
            "logprobs": None,
            "finish_reason": "tool_calls" if state.called and reason == "stop" else reason,
            "stop_reason": None if self.only_prompt else _stop_reason(end),
        }
        choice |= {"delta": content} if self.chat else {"text": ""}
        yield self._chunk(choice)

    # Log-probabilities

    def _logprobs(self, state: ChoiceState, delta: v1.Delta) -> Json | None:
        if self.top_logprobs is None or not delta.logprobs:
            return None
        if self.chat:
            return {"content": [self._scored_position(each) for each in delta.logprobs]}
        return self._text_logprobs(delta.logprobs, state.text_length)

    def _scored_position(self, position: v1.TokenLogprobs) -> Json:
        top = [self._scored(token) for token in position.top[: self.top_logprobs]]
        return {**self._scored(position.token), "top_logprobs": top}

    def _scored(self, token: v1.ScoredToken) -> Json:
        return {"token": self._name(token), "logprob": _finite(token.logprob), "bytes": list(token.bytes)}

    def _text_logprobs(self, positions: Sequence[v1.TokenLogprobs], offset: int) -> Json:
        tokens, scores, tops, offsets = [], [], [], []
        for position in positions:
            known = position.token.rank > 0
            name = self._name(position.token)
            tokens.append(name)
            scores.append(_finite(position.token.logprob) if known else None)
            top = {self._name(each): _finite(each.logprob) for each in position.top}
            tops.append(top if known else None)
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": tokens,
            "token_logprobs": scores,
            "top_logprobs": tops if self.top_logprobs else None,
            "text_offset": offsets,
        }

    def _name(self, token: v1.ScoredToken) -> str:
        return f"token_id:{token.token_id}" if self.tokens_as_ids else token.bytes.decode(errors="replace")

    @staticmethod
    def _content(text: str) -> Json:
        return {"delta": {"role": "assistant", "content": text}}


class WholeAnswer:
    """The sum of an answer's chunks."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices: dict[int, Json] = {}

    def add(self, chunk: Json) -> None:
        """Takes in one chunk."""
        for choice in chunk["choices"]:
            index = choice["index"]
            whole = self._choices.setdefault(index, {"index": index, "text": "", "logprobs": None, "stop_reason": None})
            for name, value in choice.items():
                if name == "delta":
                    _add_delta(whole, value)
                elif name == "text":
                    whole["text"] += value
                elif name == "logprobs":
                    whole["logprobs"] = _joined(whole["logprobs"], value)
                elif name == "token_ids":
                    whole.setdefault("token_ids", []).extend(value)
                elif value is not None:
                    whole[name] = value

    def result(self) -> Json:
        """The answer."""
        answer = self._answer
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {
            "id": answer.id,
            "object": "chat.completion" if answer.chat else "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [_message_choice(choice) if answer.chat else choice for choice in choices],
            "usage": answer.usage(),
        }


def _add_delta(whole: Json, delta: Json) -> None:
    whole["text"] += delta.get("content") or ""
    calls = whole.setdefault("tool_calls", [])
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def _message_choice(choice: Json) -> Json:
    calls = choice.pop("tool_calls", [])
    text = choice.pop("text")
    message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return {**choice, "message": message}


def _joined(first: Json | None, second: Json | None) -> Json | None:
    if first is None or second is None:
        return first or second
    return {name: value if value is None else value + (second[name] or []) for name, value in first.items()}


def _content_of(piece: Piece) -> Json:
    match piece:
        case Content():
            return {"content": piece.text}
        case CallBegun():
            function = {"name": piece.name, "arguments": ""}
            return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
        case CallArguments():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _stop_reason(end: v1.ChoiceFinished | v1.Finished) -> str | int | None:
    match end.WhichOneof("stop"):
        case "stop_string":
            return end.stop_string
        case "stop_token_id":
            return end.stop_token_id
    return None


def _prompt_logprob(position: v1.TokenLogprobs) -> Json | None:
    """vLLM's form: alternatives by token id; None for the first token."""
    if not position.token.rank:
        return None
    return {
        str(token.token_id): {
            "logprob": _finite(token.logprob),
            "rank": token.rank,
            "decoded_token": token.bytes.decode(errors="replace"),
        }
        for token in (*position.top, position.token)
    }


def _complete(event: v1.Prompt, token_bytes: Callable[[int], bytes]) -> list[v1.TokenLogprobs]:
    """Log-probabilities of all tokens; the first has none, but a name."""
    positions = list(event.logprobs)
    for token_id, position in zip(event.token_ids, positions, strict=True):
        if not position.HasField("token"):
            position.token.token_id, position.token.bytes = token_id, token_bytes(token_id)
    return positions


def _finite(logprob: float) -> float:
    """JSON knows no infinity; -9999 is what OpenAI writes for a probability of nothing."""
    return max(logprob, -9999.0)
