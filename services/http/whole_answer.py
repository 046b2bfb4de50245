"""Response to a request that does not stream, built by joining the streamed chunks so that both forms agree."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.v1 import generation_pb2 as v1
from services.http.answers import Answer, Json


@dataclass(slots=True, kw_only=True)
class WholeAnswer(Answer):
    """A response that joins its chunks and has no events."""

    _sums: dict[int, Json] = field(default_factory=dict)
    """Joined chunks of each choice."""

    def events(self, prompt: int, response: v1.GenerateResponse) -> Iterator[Json]:
        """Add the chunks for a message of one prompt's stream."""
        for chunk in Answer.events(self, prompt, response):
            self._add(chunk)
        return iter(())

    def _add(self, chunk: Json) -> None:
        for choice in chunk["choices"]:
            index = choice["index"]
            whole = self._sums.setdefault(index, {"index": index, "text": "", "logprobs": None, "stop_reason": None})
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

    def whole(self) -> Json:
        """Return the complete answer."""
        choices = [self._sums[index] for index in sorted(self._sums)]
        return {
            **self._head(),
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": [_message_choice(choice) if self.chat else choice for choice in choices],
            "usage": self.usage(),
        }


def _add_delta(whole: Json, delta: Json) -> None:
    whole["text"] += delta.get("content") or ""
    if "reasoning_content" in delta:
        whole["reasoning_content"] = whole.get("reasoning_content", "") + delta["reasoning_content"]
    calls = whole.setdefault("tool_calls", [])
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def _message_choice(choice: Json) -> Json:
    calls = choice.pop("tool_calls", [])
    reasoning = choice.pop("reasoning_content", None)
    text = choice.pop("text")
    message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {**choice, "message": message}


def _joined(first: Json | None, second: Json | None) -> Json | None:
    if first is None or second is None:
        return first or second
    return {name: value if value is None else value + (second[name] or []) for name, value in first.items()}
