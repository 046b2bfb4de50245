"""What a request wishes of the scheduler: checked at the door, told to the core with the submission.

Tenant and cache scope count only as far as the caller's principal may act for them; without authentication there is one
principal, which may act for every tenant (`principals`). Without an explicit scope a request shares cached prompt
prefixes with those of its own principal only, so that nobody can find out by timing what others have asked.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.principals import Principal
from shared.errors import FieldViolation
from shared.prefix_keys import following_keys, root_key

MAX_PRIORITY = 100
MAX_NAME = 128
MAX_EXPECTED_TOKENS = 1 << 24
MAX_TIME_S = 365 * 24 * 3600
"""Longest time that a request may ask for, and that the core is told; the link counts nanoseconds in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingWishes:
    """What the core is told; times are seconds of the monotonic clock."""

    tenant: str = ""
    request_class: str = ""
    priority: int = 0
    expected_output_tokens: int = 0
    ttft_by: float | None = None
    total_by: float | None = None
    cache_scope: bytes = b""

    def fill(self, submission: link_pb2.Submission, now: float) -> None:
        """Writes the wishes into a submission that leaves now."""
        submission.tenant = self.tenant
        submission.request_class = self.request_class
        submission.priority = self.priority
        submission.expected_output_tokens = self.expected_output_tokens
        submission.ttft_target_ns = left_ns(self.ttft_by, now)
        submission.total_time_target_ns = left_ns(self.total_by, now)
        submission.cache_scope = self.cache_scope


def check_scheduling(options: v1.SchedulingOptions) -> Iterator[FieldViolation]:
    """What is wrong with the options, field by field."""
    if abs(options.priority) > MAX_PRIORITY:
        yield FieldViolation("scheduling.priority", f"must lie in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    for name in ("tenant", "cache_scope", "request_class"):
        if len(getattr(options, name).encode()) > MAX_NAME:
            yield FieldViolation(f"scheduling.{name}", f"must have at most {MAX_NAME} bytes")
    if options.HasField("expected_output_tokens") and not 0 < options.expected_output_tokens <= MAX_EXPECTED_TOKENS:
        yield FieldViolation("scheduling.expected_output_tokens", f"must lie in [1, {MAX_EXPECTED_TOKENS}]")
    if options.HasField("ttft_target"):
        yield from _check_target("scheduling.ttft_target", options.ttft_target)
    if options.HasField("total_time_target"):
        yield from _check_target("scheduling.total_time_target", options.total_time_target)


def wishes(options: v1.SchedulingOptions, *, arrival: float, principal: Principal) -> SchedulingWishes:
    """The wishes of valid options of a request that arrived at `arrival`.

    Raises:
        PermissionDeniedError: the principal may not act for the tenant, or use the cache scope.
    """
    principal.check_scope(options.cache_scope)
    scope = f"scope\0{options.cache_scope}" if options.cache_scope else f"principal\0{principal.name}"
    return SchedulingWishes(
        tenant=principal.tenant(options.tenant),
        request_class=options.request_class,
        priority=options.priority,
        expected_output_tokens=options.expected_output_tokens,
        ttft_by=arrival + _seconds(options.ttft_target) if options.HasField("ttft_target") else None,
        total_by=arrival + _seconds(options.total_time_target) if options.HasField("total_time_target") else None,
        cache_scope=scope.encode(),
    )


def block_keys(model: link_pb2.ServedModel, cache_scope: bytes, prompt: bytes) -> bytes:
    """The keys of the prompt's full blocks, joined, so that the core need not compute them.

    Args:
        model: the served model; without a block size there are no keys.
        cache_scope: as in the wishes.
        prompt: the prompt's column.
    """
    if not model.block_size:
        return b""
    return following_keys(root_key(model.fingerprint, cache_scope), prompt, model.block_size)


def left_ns(point: float | None, now: float) -> int:
    """Nanoseconds left until a point in time, as the link wants them: 0 for None, otherwise in [1, MAX_TIME_S]."""
    # A point that has passed is still one; 0 would mean that there is none.
    return 0 if point is None else int(min(max(point - now, 1e-9), MAX_TIME_S) * 1e9)


def _check_target(field: str, duration: Duration) -> Iterator[FieldViolation]:
    if abs(duration.nanos) >= 10**9 or duration.seconds * duration.nanos < 0:
        yield FieldViolation(field, "is no valid duration: nanos must lie below a second and have the sign of seconds")
    elif not 0 < _seconds(duration) <= MAX_TIME_S:
        yield FieldViolation(field, "must be longer than nothing and at most 365 days")


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
