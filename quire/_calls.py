"""gRPC calls, shared by both clients: channel options, metadata and errors."""

import ipaddress
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire import errors
from quire._responses import seconds
from quire.v1 import generation_pb2 as pb

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A million detokenised tokens or a thousand embeddings exceed gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
    # Otherwise all clients of a process share one connection, and thus one front end.
    ("grpc.use_local_subchannel_pool", 1),
    # Reconnect soon after a server restart: gRPC's default waits up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Detects that the server's machine or network has failed, which closes no connection. A quiet stream may be a long
    # wait in the queue, so the number of pings without data is not limited.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)

_STATUS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_PROPAGATOR = TraceContextTextMapPropagator()


def channel_options(target: str) -> tuple[tuple[str, int], ...]:
    """Return the options for a channel. Unix sockets and loopback addresses never use a proxy, despite `http_proxy`.

    For other targets gRPC honours `http_proxy`, `https_proxy` and `no_proxy`.
    """
    return (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)) if _is_local(target) else CHANNEL_OPTIONS


def _is_local(target: str) -> bool:
    """Return whether a gRPC target is a Unix socket or a loopback address."""
    scheme, _, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    address = rest if scheme in ("dns", "ipv4", "ipv6") and not rest.isdecimal() else target
    try:
        host = urlsplit(f"//{address.rpartition('/')[2]}").hostname or ""
    except ValueError:  # Not an address, so the call will raise an error.
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class FailedCall(Protocol):
    """Common interface of grpc's and grpc.aio's errors."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def call_metadata(token: str = "") -> tuple[tuple[str, str], ...]:
    """Return the call metadata: the current OpenTelemetry context, if any, and the bearer token."""
    carrier: dict[str, str] = {"authorization": f"Bearer {token}"} if token else {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())


def read_batch_error(error: pb.Error) -> errors.QuireError:
    """Return the typed error for one request in a batch."""
    return errors.class_for(error.code, error.reason)(
        error.message or error.code,
        code=error.code,
        reason=error.reason,
        retry_after_s=seconds(error.retry_after) if error.HasField("retry_after") else None,
        violations=[errors.FieldViolation(v.field, v.description) for v in error.violations],
    )


def read_error(call: FailedCall) -> errors.QuireError:
    """Return the typed error for a failed call. Error details that cannot be parsed are ignored."""
    code = call.code().name
    trailers = _text_and_bytes(call.trailing_metadata())
    status = _parse(status_pb2.Status, trailers.get(_STATUS_KEY))
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    retry_after_s = _pushback(trailers.get(_PUSHBACK_KEY))
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = seconds(retry.retry_delay)
    reason, message = info.reason if info.domain == errors.DOMAIN else "", status.message or call.details() or code
    if code == "DEADLINE_EXCEEDED" and not reason:  # The call's own timer ended it.
        reason, message = "DEADLINE", "the timeout passed before the response was complete; allow more time"
    return errors.class_for(code, reason)(
        message,
        code=code,
        reason=reason,
        retry_after_s=retry_after_s,
        violations=[errors.FieldViolation(v.field, v.description) for v in bad_request.field_violations],
        metadata=info.metadata,
    )


def _text_and_bytes(metadata: Any) -> Mapping[str, str | bytes]:
    return dict(metadata or ())


def _parse(kind: type[status_pb2.Status], data: str | bytes | None) -> status_pb2.Status:
    status = kind()
    if isinstance(data, bytes):
        try:
            status.ParseFromString(data)
        except Exception:  # Catches protobuf's DecodeError. An invalid detail must not hide the error itself.
            return kind()
    return status


def _pushback(value: str | bytes | None) -> float | None:
    """Return gRPC's own retry hint in seconds, or None; a negative hint means do not retry."""
    try:
        milliseconds = int(value) if value is not None else -1
    except ValueError:
        return None
    return milliseconds / 1000 if milliseconds >= 0 else None
