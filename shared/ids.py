"""Random identities: incarnations and routing ids, new for every connection and never reused."""

import secrets


def draw_incarnation() -> int:
    """Return a random 64-bit number that is never 0."""
    return secrets.randbits(64) | 1


def draw_seed() -> int:
    """Return a random 64-bit seed for a request's sampling noise."""
    return secrets.randbits(64)


def draw_request_id() -> str:
    """Return a random request id."""
    return f"req-{secrets.token_hex(12)}"


def draw_error_id() -> str:
    """Return a random id for an internal error; the id appears in the error response and in the log."""
    return secrets.token_hex(6)


def routing_id(name: str, incarnation: int) -> bytes:
    """Return the ZeroMQ routing id for one incarnation of a peer."""
    return f"{name}/{incarnation:016x}".encode()
