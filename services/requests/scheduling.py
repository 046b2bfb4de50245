"""Scheduling options of a request: validated by the front end and sent to the core with the submission.

The caller's principal must have permission for the tenant and the cache scope. Without authentication, there is one
principal, which may use all tenants (`principals`). Unless a request names a scope, it shares cached prompt prefixes
only with requests from its own principal. Response times therefore reveal nothing about other principals' prompts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.access.principals import Principal
from shared.errors import FieldViolation
from shared.frames import TOKEN_BYTES
from shared.prefix_keys import following_keys, root_key
from shared.request_spec import MAX_RETENTION_PRIORITY, MAX_RETENTION_S, RequestSpec

MAX_PRIORITY = 100
"""Maximum absolute value of a priority."""
MAX_NAME = 128
"""Maximum length of a tenant, cache scope, request class or session id, bytes."""
MAX_EXPECTED_TOKENS = 1 << 24
"""Maximum of `expected_output_tokens`."""
MAX_BLOCK_KEYS = 1 << 16
"""Maximum number of 32-byte block keys that are sent with a request, so that they fit into a frame."""
MAX_TIME_S = 365 * 24 * 3600
"""Maximum target time of a request, seconds; the link counts nanoseconds in 64 bits."""

_TIMES = {
    "ttft_target": (MAX_TIME_S, "365 days"),
    "total_time_target": (MAX_TIME_S, "365 days"),
    "retention": (MAX_RETENTION_S, "24 hours"),
    "expected_pause": (MAX_RETENTION_S, "24 hours"),
}
"""Options that are times, each with its maximum in seconds and as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueTimes:
    """When a request wants its tokens, in seconds of the monotonic clock; None for no target."""

    deadline: float | None = None
    """The client's deadline. A request that misses it ends."""
    first_token: float | None = None
    """Target for the first token."""
    last_token: float | None = None
    """Target for the last token."""


def check_scheduling(options: v1.SchedulingOptions) -> Iterator[FieldViolation]:
    if abs(options.priority) > MAX_PRIORITY:
        yield FieldViolation("scheduling.priority", f"must lie in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    for name in ("tenant", "cache_scope", "request_class", "session_id"):
        value = getattr(options, name)
        if len(value.encode()) > MAX_NAME:
            yield FieldViolation(f"scheduling.{name}", f"must have at most {MAX_NAME} bytes")
        # Refuse unprintable names, because operators see them in terminals, logs and metrics.
        elif not value.isprintable():
            yield FieldViolation(f"scheduling.{name}", "has characters that are not printable; remove them")
    if options.HasField("expected_output_tokens") and not 0 < options.expected_output_tokens <= MAX_EXPECTED_TOKENS:
        yield FieldViolation("scheduling.expected_output_tokens", f"must lie in [1, {MAX_EXPECTED_TOKENS}]")
    for field, duration in options.ListFields():
        if field.name in _TIMES:
            yield from _check_time(f"scheduling.{field.name}", duration, *_TIMES[field.name])
    if options.retention_priority > MAX_RETENTION_PRIORITY:
        yield FieldViolation("scheduling.retention_priority", f"must lie in [0, {MAX_RETENTION_PRIORITY}]")
    elif options.retention_priority and not options.HasField("retention"):
        yield FieldViolation("scheduling.retention_priority", "has no effect alone; also specify the retention time")


def schedule(spec: RequestSpec, options: v1.SchedulingOptions, principal: Principal) -> RequestSpec:
    """Return the specification with valid scheduling options.

    Raises:
        PermissionDeniedError: the principal may not use the tenant or the cache scope.
    """
    principal.check_scope(options.cache_scope)
    scope = f"scope\0{options.cache_scope}" if options.cache_scope else f"principal\0{principal.name}"
    return spec._replace(
        tenant=principal.tenant(options.tenant),
        request_class=options.request_class,
        priority=options.priority,
        expected_output_tokens=options.expected_output_tokens,
        cache_scope=scope.encode(),
        session=options.session_id.encode(),
        ends_session=options.ends_session,
        retention_s=_seconds(options.retention),
        retention_priority=options.retention_priority,
        expected_pause_s=_seconds(options.expected_pause),
    )


def due_times(options: v1.SchedulingOptions, *, arrival: float, deadline: float | None) -> DueTimes:
    """Return the due times of a request with valid options that arrived at `arrival`."""
    return DueTimes(
        deadline=deadline,
        first_token=arrival + _seconds(options.ttft_target) if options.HasField("ttft_target") else None,
        last_token=arrival + _seconds(options.total_time_target) if options.HasField("total_time_target") else None,
    )


def block_keys(model: link_pb2.ServedModel, cache_scope: bytes, prompt: bytes) -> bytes:
    """Return the joined keys of a prompt's first full blocks, at most `MAX_BLOCK_KEYS`.

    The core then does not have to compute them.

    Args:
        model: the served model; without a block size there are no keys.
        cache_scope: the request's scope of the prefix cache.
        prompt: column of the prompt's tokens.
    """
    if not model.block_size:
        return b""
    beginning = prompt[: MAX_BLOCK_KEYS * TOKEN_BYTES * model.block_size]
    return following_keys(root_key(model.fingerprint, cache_scope), beginning, model.block_size)


def left_ns(point: float | None, now: float) -> int:
    """Return the nanoseconds until a time: 0 for None, otherwise in [1, MAX_TIME_S]."""
    # A passed target must remain a target, and 0 would mean that there is no target.
    return 0 if point is None else int(min(max(point - now, 1e-9), MAX_TIME_S) * 1e9)


def _check_time(field: str, duration: Duration, most: float, limit: str) -> Iterator[FieldViolation]:
    if abs(duration.nanos) >= 10**9 or duration.seconds * duration.nanos < 0:
        yield FieldViolation(field, "invalid duration; nanos must be below a second and have the sign of seconds")
    elif not 0 < _seconds(duration) <= most:
        yield FieldViolation(field, f"must be > 0 and at most {limit}")


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
