"""What every call works with: the parts of its process, who asks, and which requests are in progress."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import Tracer

from protos.quire.link.v1 import link_pb2
from services.core_link import CoreLink
from services.errors import RETRY_MS
from services.grammars import GrammarChecker
from services.metrics import FrontendMetrics
from services.principals import CURRENT
from services.tokenizer import TextTokenizer
from services.tracing import Operation, rpc
from shared.config import FrontendConfig
from shared.errors import DuplicateRequestError, NotReadyError, QuireError
from shared.logging import get_logger


@dataclass(frozen=True, slots=True)
class Services:
    """What the servicers work with."""

    config: FrontendConfig
    link: CoreLink
    tokenizer: TextTokenizer
    grammars: GrammarChecker
    metrics: FrontendMetrics
    tracer: Tracer

    def served_model(self) -> link_pb2.ServedModel:
        """The served model.

        Raises:
            NotReadyError: no worker has joined yet.
        """
        model = self.link.model
        if model is None:
            raise NotReadyError("no worker has joined yet; try again in a moment", retry_ms=RETRY_MS)
        return model

    def check_connected(self) -> None:
        """That the core can be told of a request now.

        Raises:
            NotReadyError: it is away.
        """
        if not self.link.connected:
            raise NotReadyError("the scheduler is away; try again in a moment", retry_ms=RETRY_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and until when."""

    operation: Operation = field(default_factory=lambda: rpc("Generate"))
    """What the span of the call is called."""
    principal: str = field(default_factory=lambda: CURRENT.get().name)
    traceparent: str = ""
    """W3C traceparent of the caller's span; may be empty."""
    arrival: float = field(default_factory=time.monotonic)
    """Monotonic time, seconds."""
    deadline: float | None = None
    """Monotonic time, seconds."""

    def cancel_code(self) -> str:
        """Why a request that ended without an answer or an error did so: its deadline passed, or the caller left."""
        passed = self.deadline is not None and self.deadline <= time.monotonic()
        return "DEADLINE_EXCEEDED" if passed else "CANCELLED"


class LiveRequests:
    """The requests in progress, by principal and id."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._live: Counter[tuple[str, str]] = Counter()
        self.idle = asyncio.Event()
        """Set while no request is in progress."""
        self.idle.set()

    @contextmanager
    def one_more(self, principal: str, request_id: str, *, again: bool = False) -> Iterator[None]:
        """Counts a request while it lasts; `again`: another call may still have it.

        Raises:
            DuplicateRequestError: the principal has a live request of this id.
        """
        key = (principal, request_id)
        if key in self._live and not again:
            raise DuplicateRequestError("a live request has this request_id; choose another or wait for its end")
        self._live[key] += 1
        self._tell()
        try:
            yield
        finally:
            self._live[key] -= 1
            if not self._live[key]:
                del self._live[key]
            self._tell()

    def _tell(self) -> None:
        self._metrics.live_streams.set(self._live.total())
        if self._live:
            self.idle.clear()
        else:
            self.idle.set()


@contextmanager
def outcome_told(metrics: FrontendMetrics, caller: Caller, request_id: str) -> Iterator[None]:
    """Measures and logs how a request ends."""
    outcome = ""
    try:
        yield
        outcome = "OK"
    except QuireError as error:
        outcome = error.code
        raise
    except Exception:
        outcome = "INTERNAL"
        raise
    finally:
        elapsed = time.monotonic() - caller.arrival
        metrics.duration.observe(elapsed)
        get_logger().info(
            "request ended",
            request_id=request_id,
            outcome=outcome or caller.cancel_code(),
            seconds=round(elapsed, 4),
        )
