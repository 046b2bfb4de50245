"""Converts a stored response to its events and its input items, for clients that retrieve the response."""

from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]

_DELTAS = {
    "output_text": ("response.output_text", "response.content_part", "content_index", "text"),
    "reasoning_text": ("response.reasoning_text", "response.content_part", "content_index", "text"),
    "summary_text": ("response.reasoning_summary_text", "response.reasoning_summary_part", "summary_index", "text"),
}
"""For each part type: event names for the text and for the part, name of the index, and name of the text field."""
_ARGUMENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""For each item type: name of the text events, and name of the text field."""


def events_of(response: Json) -> Iterator[Json]:
    """Yield the events of a finished response. Each text is one event."""
    for number, event in enumerate(_events(response)):
        yield {"type": event.pop("type"), "sequence_number": number, **event}


def _events(response: Json) -> Iterator[Json]:
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        yield from _item_events(item, index)
    yield {"type": f"response.{response['status']}", "response": response}


def _item_events(item: Json, index: int) -> Iterator[Json]:
    place: Json = {"item_id": item["id"], "output_index": index}
    parts = [*item.get("summary", ()), *(item.get("content") or ())]
    empty: Json = {name: [] for name in ("summary", "content") if name in item}
    if item["type"] in _ARGUMENTS:
        name, field = _ARGUMENTS[item["type"]]
        yield {"type": "response.output_item.added", "output_index": index, "item": item | {field: ""}}
        yield {"type": f"{name}.delta", **place, "delta": item[field]}
        yield {"type": f"{name}.done", **place, field: item[field]}
    else:
        added = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        for part in parts:
            text_event, part_event, number, field = _DELTAS[part["type"]]
            here = place | {number: 0}
            scores: Json = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield {"type": f"{part_event}.added", **here, "part": part | {field: ""}}
            yield {"type": f"{text_event}.delta", **here, "delta": part[field], **scores}
            yield {"type": f"{text_event}.done", **here, "text": part[field], **scores}
            yield {"type": f"{part_event}.done", **here, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def input_items(response_id: str, messages: Sequence[Json]) -> list[Json]:
    """Return the items of a conversation, the oldest first.

    Args:
        response_id: id of the response, with which the item ids begin.
        messages: the messages of the chat, without instructions.
    """
    items = [item for message in messages for item in _items(message)]
    return [{"id": f"in_{response_id}_{number}", "status": "completed", **item} for number, item in enumerate(items)]


def _items(message: Json) -> Iterator[Json]:
    content = message.get("content")
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}
        return
    if content is not None:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        part: Json = {"type": kind, "text": content}
        extra: Json = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        yield {"type": "message", "role": message["role"], "content": [part | extra]}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield {
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }
