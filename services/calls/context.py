"""Objects shared by all calls: the process's services, the caller, and the live requests."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import Span, Tracer

from protos.quire.link.v1 import link_pb2
from services.access.principals import CURRENT
from services.access.shares import Slices
from services.calls.tracing import Operation, rpc
from services.errors import RETRY_MS
from services.grammars.checker import GrammarChecker
from services.link.core_link import CoreLink
from services.metrics import FrontendMetrics
from services.parsers import ModelFormat
from services.requests.defaults import SamplingDefaults
from services.tail import TailTracing
from services.text.tokenizer import TextTokenizer
from shared.config import FrontendConfig
from shared.errors import DuplicateRequestError, NotReadyError, QuireError
from shared.logging import get_logger
from shared.metrics import span_ref

_MARKER_TOKENS = 12
"""Number of last prompt tokens that are searched for the reasoning marker, which may have several tokens."""


@dataclass(frozen=True, slots=True)
class Services:
    """Dependencies of the servicers."""

    config: FrontendConfig
    link: CoreLink
    tokenizer: TextTokenizer
    model_format: ModelFormat
    """How the served model writes reasoning and tool calls."""
    defaults: SamplingDefaults
    """Sampling options for requests that do not set them."""
    grammars: GrammarChecker
    metrics: FrontendMetrics
    slices: Slices
    """Runs long work on the event loop."""
    tracer: Tracer
    tail: TailTracing | None
    """The tail rule; None if unsampled calls make no spans."""

    def served_model(self) -> link_pb2.ServedModel:
        """Return the served model.

        Raises:
            NotReadyError: no worker has joined yet.
        """
        model = self.link.model
        if model is None:
            raise NotReadyError("service not ready: no worker has joined yet; try again in a moment", retry_ms=RETRY_MS)
        return model

    def begins_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Return whether the output of a prompt begins within reasoning."""
        token_bytes = self.tokenizer.token_bytes
        end = b"".join(token_bytes(token) for token in prompt[-_MARKER_TOKENS:])
        return self.model_format.begins_in_reasoning(end.decode(errors="replace"))

    def check_connected(self) -> None:
        """Check that the core is connected.

        Raises:
            NotReadyError: it is not.
        """
        if not self.link.connected:
            raise NotReadyError("scheduler not connected; try again in a moment", retry_ms=RETRY_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Caller of a request, with its deadline."""

    operation: Operation = field(default_factory=lambda: rpc("Generate"))
    """Name and attributes of the call's span."""
    principal: str = field(default_factory=lambda: CURRENT.get().name)
    traceparent: str = ""
    """W3C traceparent of the caller's span; may be empty."""
    arrival: float = field(default_factory=time.monotonic)
    """Monotonic time, seconds."""
    deadline: float | None = None
    """Monotonic time in seconds; None for no deadline."""

    def cancel_code(self) -> str:
        """Return the status code for a cancelled request, depending on whether its deadline has passed."""
        passed = self.deadline is not None and self.deadline <= time.monotonic()
        return "DEADLINE_EXCEEDED" if passed else "CANCELLED"


class LiveRequests:
    """Requests in progress, by principal and id."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._live: Counter[tuple[str, str]] = Counter()
        self.idle = asyncio.Event()
        """Set while no request is in progress."""
        self.idle.set()

    @contextmanager
    def track(self, principal: str, request_id: str, *, again: bool = False) -> Iterator[None]:
        """Count a request for the duration of the `with` block.

        Args:
            principal: name of the caller.
            request_id: id of the request.
            again: accept an id that another call of the principal still uses.

        Raises:
            DuplicateRequestError: the principal has a live request with this id.
        """
        key = (principal, request_id)
        if key in self._live and not again:
            raise DuplicateRequestError(
                "request_id: in use by a live request; choose another or wait for the end of that request"
            )
        self._live[key] += 1
        self._update()
        try:
            yield
        finally:
            self._live[key] -= 1
            if not self._live[key]:
                del self._live[key]
            self._update()

    def _update(self) -> None:
        self._metrics.live_streams.set(self._live.total())
        if self._live:
            self.idle.clear()
        else:
            self.idle.set()


@contextmanager
def record_outcome(
    metrics: FrontendMetrics, caller: Caller, request_id: str, span: Span, *, operation: str, model: str
) -> Iterator[None]:
    """Measure and log how a request ends."""
    outcome = error_type = ""
    try:
        yield
        outcome = "OK"
    except QuireError as error:
        outcome, error_type = error.code, error.reason
        raise
    except Exception:
        outcome = error_type = "INTERNAL"
        raise
    finally:
        elapsed = time.monotonic() - caller.arrival
        if not outcome:
            error_type = caller.cancel_code()
        metrics.request_ended(operation, model, error_type, elapsed, span_ref(span))
        get_logger().info(
            "request ended",
            request_id=request_id,
            outcome=outcome or caller.cancel_code(),
            seconds=round(elapsed, 4),
        )
