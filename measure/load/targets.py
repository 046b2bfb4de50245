"""Interface between the generator and a server: send one request, and record when its tokens arrive."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from measure.load.prompts import Prompt
from quire.types import SchedulingOptions


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it is sent."""

    prompt: Prompt
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True
    tenant: str = ""
    priority: int = 0
    """Higher is more urgent."""
    scheduling: SchedulingOptions | None = None
    """All scheduling options, over gRPC; None for tenant and priority."""
    timeout_s: float | None = None
    cancel_after: int | None = None
    """Cancel the request after this many tokens; None to never cancel."""
    keeps_answer: bool = False
    """Whether the response's text and token ids are needed for the next turn."""


@dataclass(slots=True)
class Answer:
    """One response so far."""

    message_times: "array[float]" = field(default_factory=lambda: array("d"))
    """Times of `time.perf_counter`."""
    on_tokens: Callable[[int], None] = lambda _: None
    """Called with each message's number of tokens."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def take(self, tokens: int, text: str = "", token_ids: Sequence[int] = (), *, keep: bool = False) -> None:
        """Record a message with tokens that has just arrived."""
        self.message_times.append(time.perf_counter())
        self.output_tokens += tokens
        self.on_tokens(tokens)
        if keep:
            self.text.append(text)
            self.token_ids += token_ids


class RequestFailedError(Exception):
    """A request failed. The message names the kind of failure, so that equal failures can be counted."""


class RequestCancelledError(Exception):
    """A request was cancelled as planned."""


class Target(Protocol):
    """A server under load."""

    async def connect(self) -> None:
        """Open connections before the first request. A failure shows in the requests."""

    async def stream(self, request: Request, answer: Answer) -> None:
        """Send a request and fill in the response until it is complete.

        Raises:
            RequestFailedError: the server failed, refused the request, or timed out.
            RequestCancelledError: the request was cancelled because of `cancel_after`.
        """

    async def close(self) -> None:
        """Close all connections."""
