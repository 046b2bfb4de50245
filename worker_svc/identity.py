"""The name under which a worker is known to the scheduler and to the operator."""

import hashlib

from shared.config import ConfigError

MAX_BYTES = 64
"""What the plan protocol allows."""
_DIGEST_CHARS = 8


def worker_id(wanted: str, host: str, pid: int) -> str:
    """The worker's name: what is wanted, else `host-pid`.

    Two workers of one name displace each other for ever, so a worker that nobody named must not share its name with
    another one, on this host or elsewhere. A host name too long to fit is cut and told apart by a hash of the whole.

    Args:
        wanted: the setting; empty if there is none.
        host: this machine's name.
        pid: this process's id.

    Raises:
        ConfigError: the wanted name is longer than `MAX_BYTES` in UTF-8.
    """
    if wanted:
        if len(wanted.encode()) > MAX_BYTES:
            raise ConfigError(f"worker_id: {len(wanted.encode())} bytes are too many; at most {MAX_BYTES}")
        return wanted
    suffix = f"-{pid}"
    room = MAX_BYTES - len(suffix)
    if len(host.encode()) > room:
        digest = hashlib.sha256(host.encode()).hexdigest()[:_DIGEST_CHARS]
        kept = host.encode()[: room - len(digest) - 1].decode(errors="ignore")
        host = f"{kept}-{digest}"
    return host + suffix
