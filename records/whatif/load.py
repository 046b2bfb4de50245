"""Load: the requests and workers in a run, as values for a simulation."""

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
    """Arrival time since the beginning of the load."""
    spec: RequestSpec
    num_tokens: int
    """Number of tokens at arrival: the prompt, and the tokens generated under an earlier core."""
    num_outputs: int
    """Total number of generated tokens, unless the scheduler ends the request earlier."""
    end: EndReason
    """LENGTH, STOP, STOP_STRING, CANCELLED or EMBEDDED."""
    cancelled_after: float | None = None
    """How long the client waited before it cancelled, if that was before the first token."""
    keys: bytes = b""
    """Concatenated keys of the prompt's leading full blocks."""
    following_keys: bytes = b""
    """Concatenated keys of the blocks after `keys`, as far as a later request has the same blocks."""
    block_size: int = 0
    """Tokens per block for which the keys were computed."""
    drafts: bytes = b""
    """Known draft outcomes, by index among the generated tokens; see `acceptance.Outcome`."""
    deadline: float | None = None
    """Seconds after the arrival, as are the other targets."""
    ttft_deadline: float | None = None
    total_deadline: float | None = None
    accepted: bool = False
    """Whether an earlier core had accepted the request."""
    left_out: bool = False
    """Whether the request is excluded from the results, because the record has only a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker with its joining and leaving times, in seconds since the start of the load."""

    hello: ev.WorkerHello
    joined: float = 0.0
    lost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A run to simulate."""

    config: CoreConfig
    arrivals: list[Arrival]
    """Requests, ordered by arrival time."""
    members: list[Member]
    duration: float
    """Length of the record, s."""


def most_members(members: Iterable[Member]) -> int:
    """Return the maximum number of workers present at the same time."""
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
    """Return a request from a trace, which contains only lengths.

    Args:
        at: arrival since the beginning of the load, s.
        num_prompt: number of prompt tokens.
        num_outputs: number of generated tokens.
        parts: names of the prompt's parts, with `part_tokens` tokens each; equal names mean equal tokens.
        part_tokens: number of tokens per part.
        block_size: number of tokens per block in the workers' KV cache.
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
