"""Answer of a request that does not stream: the sum of the chunks of the streamed form, so both forms agree."""

from services.http.answers import SYSTEM_FINGERPRINT, Answer, Json


class WholeAnswer:
    """The sum of an answer's chunks."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices: dict[int, Json] = {}

    def add(self, chunk: Json) -> None:
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
        """Return the complete answer."""
        answer = self._answer
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {
            "id": answer.id,
            "object": "chat.completion" if answer.chat else "text_completion",
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": [_message_choice(choice) if answer.chat else choice for choice in choices],
            "usage": answer.usage(),
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
