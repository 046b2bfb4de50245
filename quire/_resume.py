"""Resuming after a lost connection, shared by both clients.

A resumable request is identified by its id. When the connection breaks, `Resume` continues after the received output.
If the server does not know the request and no output was received, the request is sent again.
"""

import time
import uuid

import grpc

from quire import errors
from quire.v1 import generation_pb2 as pb

GIVE_UP_S = 60.0
"""Maximum time in seconds for reconnection attempts without a received message."""
_FIRST_WAIT_S = 0.05
_MAX_WAIT_S = 2.0


def make_resumable(request: pb.GenerateRequest) -> None:
    """Mark the request as resumable, and give it an id if it has none."""
    request.resumable = True
    request.request_id = request.request_id or f"req-{uuid.uuid4().hex}"


class Resumption:
    """Client-side state of one resumable request."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.request = request
        self._tokens: dict[int, int] = {}
        self._text_bytes: dict[int, int] = {}
        self._part_bytes: dict[int, int] = {}
        self._broken_since: float | None = None
        self._wait_s = _FIRST_WAIT_S
        self._send_again = False

    @property
    def sends_again(self) -> bool:
        """Whether to send the request itself next, instead of `Resume`."""
        return self._send_again

    def received(self, response: pb.GenerateResponse) -> None:
        """Record a received message."""
        self._broken_since, self._wait_s = None, _FIRST_WAIT_S
        self._send_again = False
        if response.HasField("delta"):
            delta = response.delta
            self._tokens[delta.choice] = delta.first_index + len(delta.token_ids)
            self._text_bytes[delta.choice] = self._text_bytes.get(delta.choice, 0) + len(delta.text.encode())
            self._part_bytes[delta.choice] = self._part_bytes.get(delta.choice, 0) + sum(map(_size_of, delta.parts))

    def resume_request(self) -> pb.ResumeRequest:
        """Return the `Resume` request for the missing rest."""
        num_choices = 1 + max(self._tokens, default=-1)
        parts = range(num_choices) if self.request.output.parse else ()
        return pb.ResumeRequest(
            request_id=self.request.request_id,
            from_tokens=[self._tokens.get(choice, 0) for choice in range(num_choices)],
            from_text_bytes=[self._text_bytes.get(choice, 0) for choice in range(num_choices)],
            from_part_bytes=[self._part_bytes.get(choice, 0) for choice in parts],
        )

    def failed(self, error: errors.QuireError, now: float | None = None) -> float | None:
        """Return the seconds to wait before the next attempt; None to stop retrying."""
        now = time.monotonic() if now is None else now
        if isinstance(error, errors.RequestNotFoundError) and not self._tokens and not self._send_again:
            self._send_again = True  # The request did not reach the server.
        elif isinstance(error, errors.DuplicateRequestError) and self._send_again:
            self._send_again = False  # The request reached the server.
        elif error.code != grpc.StatusCode.UNAVAILABLE.name:
            return None
        if self._broken_since is None:
            self._broken_since = now
        if now - self._broken_since > GIVE_UP_S:
            return None
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, _MAX_WAIT_S)
        return wait_s


def _size_of(part: pb.OutputPart) -> int:
    """Return the size of a part as `ResumeRequest` counts it."""
    match part.WhichOneof("kind"):
        case "content":
            return len(part.content.encode())
        case "reasoning":
            return len(part.reasoning.encode())
        case "call_arguments":
            return len(part.call_arguments.text.encode())
    return 1
