"""Identities: incarnations and routing ids, drawn afresh for every connection and never reused."""

import secrets


def draw_incarnation() -> int:
    """A random 64-bit number that is never 0."""
    return secrets.randbits(64) | 1


def draw_seed() -> int:
    """A random 64-bit key for a request's sampling noise."""
    return secrets.randbits(64)


def draw_request_id() -> str:
    """A request id for clients that chose none."""
    return f"req-{secrets.token_hex(12)}"


def draw_error_id() -> str:
    """Names one fault of ours in an answer and in the log, so that one leads to the other."""
    return secrets.token_hex(6)


def routing_id(name: str, incarnation: int) -> bytes:
    """The ZeroMQ routing id of one incarnation of a peer."""
    return f"{name}/{incarnation:016x}".encode()
