"""Conversion of parser events to parts of public messages."""

from collections.abc import Iterable

from quire.v1 import generation_pb2 as v1
from services.parsers import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning


def to_part(event: Event) -> v1.OutputPart:
    match event:
        case Content():
            return v1.OutputPart(content=event.text)
        case Reasoning():
            return v1.OutputPart(reasoning=event.text)
        case CallBegun():
            return v1.OutputPart(call_begun=v1.ToolCallBegun(index=event.index, id=event.id, name=event.name))
        case CallArguments():
            return v1.OutputPart(call_arguments=v1.ToolCallArguments(index=event.index, text=event.text))
        case CallEnded():
            return v1.OutputPart(call_ended=v1.ToolCallEnded(index=event.index))


def joined(parts: Iterable[v1.OutputPart]) -> list[v1.OutputPart]:
    """Return the parts with neighbouring texts of one kind joined."""
    whole: list[v1.OutputPart] = []
    texts: list[str] = []
    for part in parts:
        kind = part.WhichOneof("kind")
        if not (texts and kind == whole[-1].WhichOneof("kind")):
            _set_text(whole, texts)
            texts.clear()
            whole.append(v1.OutputPart())
            whole[-1].CopyFrom(part)
        match kind:
            case "content":
                texts.append(part.content)
            case "reasoning":
                texts.append(part.reasoning)
            case "call_arguments":
                texts.append(part.call_arguments.text)
    _set_text(whole, texts)
    return whole


def _set_text(whole: list[v1.OutputPart], texts: list[str]) -> None:
    """Set the text of the last part."""
    if len(texts) < 2:
        return
    last, text = whole[-1], "".join(texts)
    match last.WhichOneof("kind"):
        case "content":
            last.content = text
        case "reasoning":
            last.reasoning = text
        case "call_arguments":
            last.call_arguments.text = text
