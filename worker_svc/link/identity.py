"""Identity of a worker: its name and description for the scheduler and operators."""

import hashlib
from dataclasses import dataclass

from shared.config import ConfigError
from worker_svc.interface.limits import Limits

MAX_BYTES = 64
"""Longest name that the plan protocol allows, in UTF-8."""
_DIGEST_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Description of a worker and its model, which Hello sends to the scheduler."""

    worker_id: str
    limits: Limits
    model: str
    """Name of the model in requests."""
    architecture: str = ""
    fingerprint: str = ""
    dtype: str = ""
    eos_token_ids: tuple[int, ...] = ()
    break_even_context: int = 0
    device: str = ""
    pid: int = 0
    process: str = ""
    """Name of the process as in `shared.process_watch`."""


def worker_id(wanted: str, host: str, pid: int) -> str:
    """Return the worker's name: the configured one, else `host-pid`.

    Two workers with the same name replace each other endlessly, so default names must be unique across hosts. A host
    name that is too long is truncated, and a hash of the whole name is added.

    Args:
        wanted: the configured name; empty for none.
        host: this machine's name.
        pid: this process's id.

    Raises:
        ConfigError: the configured name is longer than `MAX_BYTES` in UTF-8.
    """
    if wanted:
        if len(wanted.encode()) > MAX_BYTES:
            raise ConfigError(
                f"worker_id: {len(wanted.encode())} bytes exceed the limit of {MAX_BYTES}; use a shorter name"
            )
        return wanted
    suffix = f"-{pid}"
    room = MAX_BYTES - len(suffix)
    if len(host.encode()) > room:
        digest = hashlib.sha256(host.encode()).hexdigest()[:_DIGEST_CHARS]
        kept = host.encode()[: room - len(digest) - 1].decode(errors="ignore")
        host = f"{kept}-{digest}"
    return host + suffix
