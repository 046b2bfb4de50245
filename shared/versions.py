"""Version negotiation of the protocols between processes.

Each side supports a range of versions, usually the current and the previous one, so that a service's processes can be
upgraded one by one. The handshake contains the range. The scheduler chooses the newest common version and sends it
back. A feature is used only if the chosen version has it. Ranges without a common version are rejected with a message
that contains both ranges and the remedy.
"""

from dataclasses import dataclass


class UnsupportedVersionError(ValueError):
    """The two sides have no common version, or one side lacks a required version. The message is for operators."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Range of supported versions."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


def spoken(oldest: int, newest: int) -> Versions:
    """Return the range in a handshake. A peer that does not support ranges sends no `newest` (0)."""
    return Versions(oldest, max(oldest, newest))


def negotiate(protocol: str, *, scheduler: Versions, peer: Versions, role: str) -> int:
    """Return the newest version that the scheduler and a peer both support.

    Args:
        protocol: name of the protocol.
        scheduler: versions of the scheduler.
        peer: versions of the peer.
        role: role of the peer.

    Raises:
        UnsupportedVersionError: there is no common version.
    """
    version = min(scheduler.newest, peer.newest)
    if version >= max(scheduler.oldest, peer.oldest):
        return version
    behind = role if peer.newest < scheduler.oldest else "scheduler"
    raise UnsupportedVersionError(
        f"{protocol} protocol: the {role} supports version {peer}, the scheduler {scheduler};"
        f" upgrade the {behind} (adjacent releases are compatible)"
    )
