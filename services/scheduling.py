"""What a request wishes of the scheduler: checked at the door, told to the core with the submission.

Tenant and cache scope count only as far as the caller's principal may act for them; without authentication there is one
principal, which may act for every tenant. Without an explicit scope a request shares cached prompt prefixes with those
of its own principal only, so that nobody can find out by timing what others have asked.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from shared.errors import FieldViolation
from shared.prefix_keys import extend_keys, root_key

MAX_PRIORITY = 100
MAX_NAME = 128
MAX_EXPECTED_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingWishes:
    """What the core is told; times are seconds of the monotonic clock."""

    tenant: str = ""
    priority: int = 0
    expected_output_tokens: int = 0
    ttft_by: float | None = None
    total_by: float | None = None
    cache_scope: bytes = b""

    def fill(self, submission: link_pb2.Submission, now: float) -> None:
        """Writes the wishes into a submission that leaves now."""
        submission.tenant = self.tenant
        submission.priority = self.priority
        submission.expected_output_tokens = self.expected_output_tokens
        submission.ttft_target_ns = _left_ns(self.ttft_by, now)
        submission.total_time_target_ns = _left_ns(self.total_by, now)
        submission.cache_scope = self.cache_scope


def check_scheduling(options: v1.SchedulingOptions) -> Iterator[FieldViolation]:
    """What is wrong with the options, field by field."""
    if abs(options.priority) > MAX_PRIORITY:
        yield FieldViolation("scheduling.priority", f"must lie in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    for name in ("tenant", "cache_scope"):
        if len(getattr(options, name).encode()) > MAX_NAME:
            yield FieldViolation(f"scheduling.{name}", f"must have at most {MAX_NAME} bytes")
    if options.HasField("expected_output_tokens") and not 0 < options.expected_output_tokens <= MAX_EXPECTED_TOKENS:
        yield FieldViolation("scheduling.expected_output_tokens", f"must lie in [1, {MAX_EXPECTED_TOKENS}]")
    if options.HasField("ttft_target") and _seconds(options.ttft_target) <= 0:
        yield FieldViolation("scheduling.ttft_target", "must be longer than nothing")
    if options.HasField("total_time_target") and _seconds(options.total_time_target) <= 0:
        yield FieldViolation("scheduling.total_time_target", "must be longer than nothing")


def wishes(options: v1.SchedulingOptions, *, arrival: float, principal: str) -> SchedulingWishes:
    """The wishes of valid options of a request that arrived at `arrival`."""
    scope = f"scope\0{options.cache_scope}" if options.cache_scope else f"principal\0{principal}"
    return SchedulingWishes(
        tenant=options.tenant,
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
    keys: list[bytes] = []
    if model.block_size:
        extend_keys(keys, root_key(model.fingerprint, cache_scope), prompt, model.block_size)
    return b"".join(keys)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _left_ns(point: float | None, now: float) -> int:
    # A target that has passed is still a target; 0 would mean that there is none.
    return 0 if point is None else max(int((point - now) * 1e9), 1)
