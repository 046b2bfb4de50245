"""Writes an output as events of the Responses API, and as the whole response."""

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.v1 import generation_pb2 as v1
from services.http.logprobs import Logprobs
from services.http.output import ChatAnswer, ChatOutput
from services.http.responses.schema import ResponsesBody, ResponseTool
from services.http.responses.tools import callable_tools, custom_input

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Text:
    """Position of a text in an item, and the names of the text's events."""

    item: str
    """Type of the item."""
    place: str
    """Field of the item that contains the part with the text."""
    kind: str
    """Type of the part."""
    event: str
    """Name prefix of events about the text."""
    part_event: str
    """Name prefix of events about the part."""
    index: str
    """Name of the event field with the part number, which is always 0."""


_MESSAGE = _Text("message", "content", "output_text", "output_text", "content_part", "content_index")
_REASONING = _Text("reasoning", "content", "reasoning_text", "reasoning_text", "content_part", "content_index")
_SUMMARY = _Text(
    "reasoning", "summary", "summary_text", "reasoning_summary_text", "reasoning_summary_part", "summary_index"
)
"""Reasoning for which the client requests a summary. The reasoning is sent as the summary, because many clients read
only the summary.
"""


class ResponsesAnswer(ChatAnswer):
    """One response: a list of output items, each of which starts, grows and ends."""

    def __init__(
        self,
        body: ResponsesBody,
        response_id: str,
        model: str,
        output: ChatOutput,
        logprobs: Logprobs | None = None,
        defaults: Mapping[str, float] | None = None,
    ) -> None:
        """Start a response.

        Args:
            body: the request.
            response_id: the id of the response.
            model: name of the model.
            output: takes the generator's messages.
            logprobs: form of log-probabilities; None for none.
            defaults: sampling defaults of the model.
        """
        super().__init__(output)
        self._body = body
        self._id = response_id
        self._model = model
        self._tools = {tool.function: tool for tool in callable_tools(body.tools)}
        self._logprobs = logprobs
        self._defaults = defaults or {}
        self._scored: list[Json] = []
        """Log-probabilities of tokens whose text has not been sent."""
        self._reasoning = _SUMMARY if body.reasoning is not None and body.reasoning.summary else _REASONING
        self._created = int(time.time())
        self._items: list[Json] = []
        self._open = False
        """Whether the last item has not ended."""
        self._pieces: list[str] = []
        """Pieces of the open item: its text, or the arguments of its tool call."""
        self._sequence = 0

    def begin(self) -> Iterator[Json]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self.response("in_progress"))

    def write(self, message: v1.GenerateResponse) -> Iterator[Json]:
        if self._logprobs is not None and message.HasField("delta"):
            self._scored += self._logprobs.of_chat(message.delta.logprobs)["content"]
        for part in self.output.take(message):
            yield from self._piece(part)
        if self.output.finished is not None:
            yield from self._end_item()
            status = "incomplete" if self.output.reached_limit else "completed"
            yield self._event(f"response.{status}", response=self.response(status))

    def response(self, status: str = "") -> Json:
        """Return the whole response so far, by default as finished."""
        body, output = self._body, self.output
        status = status or ("incomplete" if output.reached_limit else "completed")
        usage = None
        if status != "in_progress":
            usage = {
                "input_tokens": output.prompt_tokens,
                "input_tokens_details": {"cached_tokens": output.cached_tokens},
                "output_tokens": output.output_tokens,
                "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
                "total_tokens": output.prompt_tokens + output.output_tokens,
            }
        form = body.text.format if body.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning is not None else None,
                "summary": body.reasoning.summary if body.reasoning is not None else None,
            },
            "store": body.store,
            "temperature": self._defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": _tool_choice(body),
            "tools": [_tool(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }

    def _piece(self, part: v1.OutputPart) -> Iterator[Json]:
        match part.WhichOneof("kind"):
            case "reasoning":
                self._scored = []
                yield from self._text(self._reasoning, part.reasoning)
            case "content":
                yield from self._text(_MESSAGE, part.content)
            case "call_begun":
                self._scored = []
                yield from self._end_item()
                yield from self._add_item(self._call(part.call_begun))
            case "call_arguments":
                self._pieces.append(part.call_arguments.text)
                if self._items[-1]["type"] == "function_call":
                    yield self._item_event("response.function_call_arguments.delta", delta=part.call_arguments.text)
            case "call_ended":
                yield from self._end_item(completed=True)

    def _call(self, call: v1.ToolCallBegun) -> Json:
        """Return the item of a call that begins."""
        tool = self._tools.get(call.name)
        item: Json = {"status": "in_progress", "call_id": call.id, "name": tool.name if tool else call.name}
        if tool is not None and tool.namespace:
            item["namespace"] = tool.namespace
        if tool is None or not tool.custom:
            return {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", **item, "arguments": ""}
        return {"id": f"ctc_{secrets.token_hex(16)}", "type": "custom_tool_call", **item, "input": ""}

    def _text(self, form: _Text, text: str) -> Iterator[Json]:
        """Add text to the last item if it has this form. Otherwise start a new item."""
        if not self._open or self._items[-1]["type"] != form.item:
            yield from self._end_item()
            own: Json = {"role": "assistant"} if form is _MESSAGE else {"summary": []}
            prefix = "msg" if form is _MESSAGE else "rs"
            item = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": form.item, **own, "status": "in_progress"}
            yield from self._add_item(item | {form.place: []})
            self._items[-1][form.place] = [_part(form, "")]
            yield self._item_event(f"response.{form.part_event}.added", part=_part(form, ""), **{form.index: 0})
        part = self._items[-1][form.place][0]
        self._pieces.append(text)
        extra: Json = {form.index: 0}
        if form is _MESSAGE:
            extra["logprobs"], self._scored = self._scored, []
            part["logprobs"] += extra["logprobs"]
        yield self._item_event(f"response.{form.event}.delta", delta=text, **extra)

    def _add_item(self, item: Json) -> Iterator[Json]:
        self._items.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _end_item(self, *, completed: bool = False) -> Iterator[Json]:
        if not self._open:
            return
        self._open = False
        item, text = self._items[-1], "".join(self._pieces)
        self._pieces.clear()
        if item["type"] == "function_call":
            item["arguments"] = text
            arguments = {"arguments": text, "name": item["name"]}
            yield self._item_event("response.function_call_arguments.done", **arguments)
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(text)
            yield self._item_event("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._item_event("response.custom_tool_call_input.done", input=item["input"])
        else:
            form = _MESSAGE if item["type"] == "message" else self._reasoning
            part = item[form.place][0]
            part["text"] = text
            extra: Json = {form.index: 0} | ({"logprobs": part["logprobs"]} if form is _MESSAGE else {})
            yield self._item_event(f"response.{form.event}.done", text=text, **extra)
            yield self._item_event(f"response.{form.part_event}.done", part=dict(part), **{form.index: 0})
        item["status"] = "incomplete" if self.output.reached_limit and not completed else "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _item_event(self, event: str, /, **fields: object) -> Json:
        return self._event(event, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, event: str, /, **fields: object) -> Json:
        content = {"type": event, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return content


def _part(form: _Text, text: str) -> Json:
    part: Json = {"type": form.kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if form is _MESSAGE else part


def _tool(tool: ResponseTool) -> Json:
    """Return a tool as the client sent it, but with all fields for functions."""
    given = tool.model_dump(exclude_unset=tool.type != "function", exclude={"tools", "format"})
    if tool.type == "function":
        given["strict"] = bool(tool.strict)
    if tool.format is not None:
        given["format"] = tool.format
    if tool.tools is not None:
        given["tools"] = [_tool(each) for each in tool.tools]
    return given


def _tool_choice(body: ResponsesBody) -> str | Json:
    if body.tool_choice is None:
        return "auto"
    return body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()
