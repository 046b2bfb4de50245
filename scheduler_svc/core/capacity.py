"""How much memory a request must find before it is admitted.

* `guaranteed_no_evict`: the blocks of its longest possible sequence, on top of those of everybody who runs. A request
  that has started is never paused for memory.
* `max_utilization`: the blocks of its present tokens, and a headroom for those who run to grow. The headroom is
  learned: it doubles when a request had to be preempted and decays with every step in which none was, so it settles
  where preemptions are rare.
"""

import numpy as np

from scheduler_svc.core.rows import RowTable

CAPACITY_MODES = ("max_utilization", "guaranteed_no_evict")

_DECAY = 0.999
_MAX_HEADROOM = 64.0


class Capacity:
    """The admission test of one worker."""

    def __init__(self, mode: str, num_blocks: int, watermark: float) -> None:
        self._guaranteed = mode == "guaranteed_no_evict"
        self._num_blocks = num_blocks
        self._watermark = int(watermark * num_blocks)
        self._headroom = 0.0
        """Blocks per running request."""

    def admits(self, rows: RowTable, *, num_new: int, worst_blocks: int, num_available: int) -> bool:
        """Whether a request fits.

        Args:
            rows: who runs.
            num_new: blocks to take for its present tokens.
            worst_blocks: blocks of its longest possible sequence, shared ones included.
            num_available: blocks that can be taken now.
        """
        if num_new > num_available:
            return False
        if not rows.num_running:
            return True
        if self._guaranteed:
            # The last token of a sequence is never computed, it needs no slot.
            worst = -(-(rows.limit[rows.occupied()] - 1) // rows.block_size)
            return int(np.sum(worst)) + worst_blocks <= self._num_blocks
        reserve = max(self._watermark, int(self._headroom * rows.num_running))
        return num_new + reserve <= num_available

    def preempted(self) -> None:
        """A request had to be preempted for memory."""
        self._headroom = min(_MAX_HEADROOM, max(0.25, 2 * self._headroom))

    def went_well(self) -> None:
        """A step was planned without preemption."""
        self._headroom *= _DECAY
