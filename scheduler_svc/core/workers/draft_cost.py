"""Draft cost: the time that draft tokens add to a decode step, by approximate number of rows.

A step's first draft adds more time than the others, because proposing, building and verifying it takes host work.
Therefore a line is fitted to the difference between the time of steps with drafts and the expected time without drafts.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

_FloatArray = npt.NDArray[np.float64]

_RECENT = 9
"""Number of recent steps with drafts that are stored."""
_SAMPLES = 4
"""Steps with drafts to measure before their time is known. The first step is a warm-up and not used."""
_MOST_OF_EXPECTED = 2.0
"""Cap on a step's time as a multiple of the expected time. A longer step was disturbed."""
_MOST_UNKNOWN = 3.0
"""The same cap for a step with drafts whose time is unknown, relative to a step without drafts."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 512
"""Steps without drafts before the time of drafts is measured again. Each pause is twice as long as the previous one."""


class DraftCost:
    """Learned time of drafts; seconds."""

    def __init__(self) -> None:
        """Start without measurements."""
        self.fixed_s = 0.0
        """Time that the first draft adds in addition to the time per draft."""
        self.draft_s = 0.0
        """Time that each draft adds."""
        self.num_steps = 0
        """Measured steps with drafts."""
        self.age = 0
        """Steps without drafts since the last measured one with drafts."""
        self.pause = FIRST_PAUSE
        """Steps without drafts after which their time is measured again."""
        self._added: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        """Drafts and added times of the last steps with drafts."""

    @property
    def is_known(self) -> bool:
        """Whether enough steps with drafts were measured."""
        return self.num_steps >= _SAMPLES

    def added_s(self, num_drafts: int) -> float:
        """Return the time that drafts are expected to add to a step."""
        return self.fixed_s + self.draft_s * num_drafts if num_drafts else 0.0

    def counted_s(self, plain_s: float, num_drafts: int, duration: float) -> float:
        """Return the step's time, capped because a step that is much longer than expected was disturbed.

        Args:
            plain_s: expected time of the step without drafts.
            num_drafts: verified drafts; it may be none, although some were allowed.
            duration: the step's time.
        """
        most = _MOST_OF_EXPECTED * (plain_s + self.added_s(num_drafts)) if self.is_known else _MOST_UNKNOWN * plain_s
        return min(duration, most)

    def measured(self, plain_s: float, num_drafts: int, duration: float) -> None:
        """Record a decode step in which drafts were allowed. The arguments are as in `counted_s`."""
        if not num_drafts:
            return
        added = max(0.0, self.counted_s(plain_s, num_drafts, duration) - plain_s)
        self.num_steps += 1
        self.age = 0
        if self.num_steps > 1:
            self._fit(num_drafts, added)

    def _fit(self, num_drafts: int, added: float) -> None:
        """Fit a line to the added times by the number of drafts, without the step that is furthest above it.

        As long as all steps verified about the same number of drafts, the first draft has half of the added time.
        """
        self._added.append((num_drafts, added))
        drafts, times = np.array(self._added, np.float64).T
        self._fit_line(drafts, times)
        if len(times) >= _SAMPLES - 1:
            kept = np.arange(len(times)) != np.argmax(times - self.fixed_s - self.draft_s * drafts)
            self._fit_line(drafts[kept], times[kept])

    def _fit_line(self, drafts: _FloatArray, times: _FloatArray) -> None:
        n, x = float(drafts.mean()), float(times.mean())
        covariance, variance = float(((drafts - n) * (times - x)).mean()), float(drafts.var())
        self.draft_s = min(max(0.0, (covariance + 0.5 * x / n) / (variance + 1.0)), x / n)
        self.fixed_s = x - self.draft_s * n
