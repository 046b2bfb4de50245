"""Base of all adversaries."""

from abc import ABC, abstractmethod

PATIENCE_S = 60.0
BATCH = 1000
"""Frames between two checks."""
PROMPT = [20, 21, 22, 23, 24]


class Adversary(ABC):
    """Attacks one socket of one process."""

    pid: int
    """Of the process."""

    @abstractmethod
    def batch(self) -> int:
        """Sends frames; returns how many the process has read."""

    @abstractmethod
    def check(self) -> None:
        """Asserts that the process still does its work, and does it right."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything."""

    @abstractmethod
    def print_log(self) -> None:
        """Prints what helps to understand a failure."""
