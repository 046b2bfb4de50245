"""Leader number: fences the frames of an earlier leader.

A scheduler that takes over leads under a number above all numbers that it knows. The first number of a service is the
time in ms, so that a service which starts again without its files does not reuse low numbers. A folder stores the last
number of this scheduler and the highest number of all schedulers.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_NAME = "leader-number"


class ReplacedError(ValueError):
    """Another scheduler has taken over from this one; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Leader numbers that a scheduler knows."""

    own: int = 0
    """Last number under which this scheduler led; 0 if it never led."""
    highest: int = 0
    """Highest number of any scheduler."""

    def to_start(self, now_ms: int) -> int:
        """Return the number of a scheduler that leads at once.

        Raises:
            ReplacedError: another scheduler has taken over since this scheduler led.
        """
        if self.highest > self.own:
            raise ReplacedError(
                f"leader number {self.own}: another scheduler has led under number {self.highest}; start this scheduler"
                " with --standby-of"
            )
        return self.own or now_ms

    def to_take_over(self, now_ms: int) -> int:
        """Return the number of a scheduler that takes over."""
        return self.highest + 1 if self.highest else now_ms

    def led(self, number: int) -> "Numbers":
        """Return the numbers after this scheduler has begun to lead."""
        return Numbers(number, max(number, self.highest))

    def seen(self, number: int) -> "Numbers":
        """Return the numbers after a message with this number."""
        return self if number <= self.highest else Numbers(self.own, number)


class NumberFile:
    """File in the journal's folder that stores `Numbers`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME

    def read(self) -> Numbers:
        """Return the stored numbers; none are stored before the first start.

        Raises:
            ValueError: the file has other content.
        """
        try:
            own, highest = self._path.read_text().split()
        except FileNotFoundError:
            return Numbers()
        except ValueError:
            raise ValueError(f"{self._path} does not contain leader numbers; delete it") from None
        return Numbers(int(own), int(highest))

    def write(self, numbers: Numbers) -> None:
        """Replace the stored numbers, durably.

        Raises:
            OSError: the file cannot be written.
        """
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._path.with_name(f"{_NAME}.new")
        with fresh.open("w") as file:
            file.write(f"{numbers.own} {numbers.highest}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
