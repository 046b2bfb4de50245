"""Writes an output as events of the Messages API, and as the whole message."""

import json
import math
from collections.abc import Iterator
from typing import Any

from quire.v1 import generation_pb2 as v1
from services.http.output import ChatAnswer, ChatOutput

Json = dict[str, Any]


class MessagesAnswer(ChatAnswer):
    """One message: a list of content blocks, each of which starts, grows and ends."""

    def __init__(self, message_id: str, model: str, output: ChatOutput) -> None:
        super().__init__(output)
        self._id = message_id
        self._model = model
        self._blocks: list[Json] = []
        self._open = False
        """Whether the last block has not ended."""
        self._pieces: list[str] = []
        """Pieces of the open block: its text, or the arguments of its tool call."""

    def begin(self) -> Iterator[Json]:
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message | {"usage": self._usage() | {"output_tokens": 0}}}

    def write(self, message: v1.GenerateResponse) -> Iterator[Json]:
        for part in self.output.take(message):
            yield from self._piece(part)
        if self.output.finished is not None:
            yield from self._end_block()
            yield {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
            yield {"type": "message_stop"}

    def message(self) -> Json:
        return {**self._head(), "content": self._blocks, **self._stop(), "usage": self._usage()}

    def _piece(self, part: v1.OutputPart) -> Iterator[Json]:
        match part.WhichOneof("kind"):
            case "reasoning":
                yield from self._text("thinking", "thinking_delta", part.reasoning)
            case "content":
                yield from self._text("text", "text_delta", part.content)
            case "call_begun":
                begun = part.call_begun
                yield from self._begin_block({"type": "tool_use", "id": begun.id, "name": begun.name, "input": {}})
            case "call_arguments":
                self._pieces.append(part.call_arguments.text)
                yield self._delta({"type": "input_json_delta", "partial_json": part.call_arguments.text})
            case "call_ended":
                yield from self._end_block()

    def _text(self, kind: str, delta: str, text: str) -> Iterator[Json]:
        """Add text to the last block if it is of this kind. Otherwise start a new block."""
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._begin_block({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._pieces.append(text)
        yield self._delta({"type": delta, kind: text})

    def _begin_block(self, block: Json) -> Iterator[Json]:
        yield from self._end_block()
        self._blocks.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _end_block(self) -> Iterator[Json]:
        if self._open:
            self._open = False
            block, text = self._blocks[-1], "".join(self._pieces)
            self._pieces.clear()
            if block["type"] == "tool_use":
                block["input"] = _parsed(text)
            else:
                block[block["type"]] = text
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _head(self) -> Json:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _stop(self) -> Json:
        finished = self.output.finished
        if finished is not None and finished.WhichOneof("stop") == "stop_string":
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
        reason = "max_tokens" if self.output.reached_limit else "tool_use" if self._calls_tools() else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _calls_tools(self) -> bool:
        return any(block["type"] == "tool_use" for block in self._blocks)

    def _usage(self) -> Json:
        cached = self.output.cached_tokens
        return {
            "input_tokens": self.output.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.output.output_tokens,
        }


def _parsed(arguments: str) -> Json:
    """Return the arguments as an object. If they are not valid, return their text under the key "incomplete"."""
    if not arguments:
        return {}
    try:
        parsed = json.loads(arguments, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return {"incomplete": arguments}
    return parsed if isinstance(parsed, dict) else {"incomplete": arguments}


def _finite(text: str) -> float:
    """Return a number of JSON; NaN and infinity are invalid."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number
