"""Messages of a generator whose output was parsed."""

from collections.abc import Sequence

from quire.v1 import generation_pb2 as v1
from services.calls.parts import to_part
from services.parsers import FAMILIES, OutputParser, Read


def deltas(
    pieces: Sequence[str], token_ids: Sequence[int] = (), *, read: Read = FAMILIES["hermes"].read, reasons: bool = False
) -> list[v1.GenerateResponse]:
    """Return one message per piece of an output, and one for what the parser held back."""
    parser = OutputParser(read, reasons=reasons)
    found = [parser.push(piece) for piece in pieces]
    messages = [
        v1.Delta(text=piece, token_ids=token_ids, parts=map(to_part, events))
        for piece, events in zip(pieces, found, strict=True)
    ]
    messages.append(v1.Delta(parts=map(to_part, parser.finish())))
    return [v1.GenerateResponse(delta=message) for message in messages]
