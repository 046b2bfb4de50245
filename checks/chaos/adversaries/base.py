"""Base class of all adversaries."""

from abc import ABC, abstractmethod

PATIENCE_S = 60.0
BATCH = 1000
"""Frames between two checks."""
PROMPT = [20, 21, 22, 23, 24]


class Adversary(ABC):
    """Attacks one socket of one process."""

    pid: int
    """Process ID of the target."""

    @abstractmethod
    def batch(self) -> int:
        """Send frames; return how many the target has read."""

    @abstractmethod
    def check(self) -> None:
        """Assert that the target still works correctly."""

    @abstractmethod
    def close(self) -> None:
        """Stop all processes."""

    @abstractmethod
    def print_log(self) -> None:
        """Print the log lines that help to understand a failure."""
