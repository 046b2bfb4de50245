"""Versions of a protocol between two of our processes, and which one they speak with each other.

Each side speaks a range of versions: its own, and the one before, so that the processes of a service can be upgraded
one by one. The greeting names the range; the scheduler picks the newest version that both speak and says so. What a
version adds is used only where that version, or a newer one, was picked. Ranges that have nothing in common are
refused, with both of them in the message and what to do about it.
"""

from dataclasses import dataclass


class UnsupportedVersionError(ValueError):
    """Two sides have no version in common, or one cannot serve what the other is; the message is for the operator."""


@dataclass(frozen=True, slots=True)
class Versions:
    """What one side speaks."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


def spoken(oldest: int, newest: int) -> Versions:
    """What a greeting says; one from before ranges has no `newest` (0)."""
    return Versions(oldest, max(oldest, newest))


def negotiate(protocol: str, *, scheduler: Versions, peer: Versions, role: str) -> int:
    """The newest version that the scheduler and a peer both speak.

    Args:
        protocol: its name.
        scheduler: what the scheduler speaks.
        peer: what the peer speaks.
        role: what the peer is.

    Raises:
        UnsupportedVersionError: there is none.
    """
    version = min(scheduler.newest, peer.newest)
    if version >= max(scheduler.oldest, peer.oldest):
        return version
    behind = role if peer.newest < scheduler.oldest else "scheduler"
    raise UnsupportedVersionError(
        f"the {role} speaks version {peer} of the {protocol} protocol, the scheduler {scheduler}: upgrade the {behind};"
        " one release may differ from the next by one version"
    )
