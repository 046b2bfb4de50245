"""Load: the requests and workers of a run, as values that a simulation serves."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import EndReason
from shared.request_spec import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request, and how it ends; times in seconds."""

    at: float
    """Since the beginning of the load."""
    spec: RequestSpec
    num_tokens: int
    """Tokens that it arrives with: its prompt, and what an earlier core had generated."""
    num_outputs: int
    """Tokens that it generates in all, unless the scheduler ends it earlier."""
    end: EndReason
    """LENGTH, STOP, STOP_STRING, CANCELLED or EMBEDDED."""
    cancelled_after: float | None = None
    """For CANCELLED before the first token: how long its client waited."""
    keys: bytes = b""
    """Joined keys of the leading full blocks of its prompt."""
    following_keys: bytes = b""
    """Joined keys of the blocks after these, as far as a later request has the same ones."""
    block_size: int = 0
    """Tokens per block of the keys."""
    drafts: bytes = b""
    """Known outcomes of drafts, by index among its generated tokens; see `acceptance.Outcome`."""
    deadline: float | None = None
    """After the arrival; so are the others."""
    ttft_deadline: float | None = None
    total_deadline: float | None = None
    accepted: bool = False
    """Whether an earlier core had accepted it."""
    left_out: bool = False
    """Whether it is in no figure, because the record has only a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker, and when it takes part; seconds since the beginning of the load."""

    hello: ev.WorkerHello
    joined: float = 0.0
    lost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A run to simulate."""

    config: CoreConfig
    arrivals: list[Arrival]
    """In order of time."""
    members: list[Member]
    duration: float
    """Length of the record, s."""


def most_members(members: Iterable[Member]) -> int:
    """Return the largest number of workers at any time."""
    changes = []
    for member in members:
        changes.append((member.joined, 1))
        if member.lost is not None:
            changes.append((member.lost, -1))
    most = present = 0
    for _, change in sorted(changes):
        present += change
        most = max(most, present)
    return most


def traced(
    at: float, num_prompt: int, num_outputs: int, parts: Sequence[int] = (), *, part_tokens: int = 0, block_size: int
) -> Arrival:
    """Return a request of a trace, which knows only lengths.

    Args:
        at: arrival since the beginning of the load, s.
        num_prompt: tokens of its prompt.
        num_outputs: tokens that it generates.
        parts: names of the parts of its prompt, `part_tokens` each; equal names stand for equal tokens.
        part_tokens: tokens of a part.
        block_size: tokens per block of the workers' KV cache.
    """
    keys, key = [], b""
    for end in range(block_size, min(num_prompt, len(parts) * part_tokens) + 1, block_size):
        names = parts[(end - block_size) // part_tokens : (end - 1) // part_tokens + 1]
        key = hashlib.sha256(key + repr(tuple(names)).encode()).digest()
        keys.append(key)
    return Arrival(
        at=at,
        spec=RequestSpec(f"trace at {at:.6f}", num_prompt, num_outputs),
        num_tokens=num_prompt,
        num_outputs=num_outputs,
        end=EndReason.LENGTH,
        keys=b"".join(keys),
        block_size=block_size,
    )
