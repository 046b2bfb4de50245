"""Copy cost: the time that a worker takes to copy a block between device and host, or to read it from disk.

Copies on a CPU delay the step. Copies on a GPU overlap with the step and mostly delay only the request that waits for
them. The share of their time that delays steps is therefore learned, too.

The worker measures its copies separately. While copying is slower than recomputing tokens, no copies are made or
measured. Because the last measured copy may have been slow by chance, the worker still makes a copy from time to time,
after increasingly long pauses.
"""

_RISE, _FALL = 0.2, 0.5
"""Weights of a new copy that was slower or faster than expected. A slow copy counts less, because it may be disturbed.
"""
_MOST_CHANGE = 2.0
"""Maximum ratio between a block's learned time and a sample."""
_KNOWN = 3
"""Number of copies to measure before swapping may be abandoned. The first ones touch their memory for the first
time.
"""
_SHARE_GAIN = 0.1
"""Weight of a new copy in the share of time that delays steps."""
_LEAST_SHARE = 0.02
"""A copy to the host counts at least with this share of its time, because it takes memory bandwidth and planning."""
_OVERLAP = 0.9
"""Copies overlap with steps if a smaller share of their time delays steps."""
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 256
"""Decisions against swapping before a copy is measured again. Each pause is twice as long as the previous one."""


class _Retries:
    """When to make a copy although the last measured copies were too slow."""

    def __init__(self) -> None:
        self._pause = _FIRST_PAUSE
        self._num_refused = 0
        """Decisions against copying since the last measured copy."""

    def measured(self, *, is_faster: bool) -> None:
        self._num_refused = 0
        if is_faster:
            self._pause = _FIRST_PAUSE

    def due(self) -> bool:
        """Count a decision against copying; return whether to copy nevertheless."""
        self._num_refused += 1
        if self._num_refused <= self._pause:
            return False
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._num_refused = 0
        return True


class CopyCost:
    """Learned time of block copies; seconds."""

    def __init__(self) -> None:
        """Start without measurements."""
        self.block_s = 0.0
        """Time per block; 0 if not measured."""
        self.delay_share = 1.0
        """Share of the time that delays steps, 0 to 1."""
        self._is_share_known = False
        self._num_copies = 0
        self._swaps, self._moves = _Retries(), _Retries()

    @property
    def overlaps(self) -> bool:
        """Whether copies overlap with steps. False if not measured."""
        return self.block_s > 0.0 and self.delay_share < _OVERLAP

    def measured(self, num_blocks: int, seconds: float, delay_s: float | None = None) -> None:
        """Record that the worker has copied blocks in `seconds`, and the delay of a step that computed meanwhile."""
        if delay_s is not None and seconds > 0:
            gain = _SHARE_GAIN if self._is_share_known else 1.0
            self.delay_share += gain * (min(1.0, delay_s / seconds) - self.delay_share)
            self._is_share_known = True
        sample, known = seconds / num_blocks, self.block_s
        is_faster = self._num_copies >= _KNOWN and sample < known
        for retries in (self._swaps, self._moves):
            retries.measured(is_faster=is_faster)
        if not self._num_copies:
            self.block_s = sample
        elif self._num_copies < _KNOWN:
            self.block_s = min(sample, known)
        else:
            sample = min(max(sample, known / _MOST_CHANGE), known * _MOST_CHANGE)
            self.block_s += (_RISE if sample > known else _FALL) * (sample - known)
        self._num_copies += 1

    def pays(self, num_blocks: int, recompute_s: float) -> bool:
        """Return whether copying blocks out and in is faster than recomputing their tokens in `recompute_s`."""
        return self._pays(2 * num_blocks, recompute_s) or self._swaps.due()

    def move_pays(self, recompute_s: float, return_chance: float) -> bool:
        """Return whether copying a cached block out, and back in if it returns, is faster than recomputing it then.

        A copy out costs only the time that it delays steps. The request waits for a copy back in.

        Args:
            recompute_s: time to compute the block, s.
            return_chance: chance that a request continues with it.
        """
        return self.sequence_pays(1, recompute_s, return_chance) or self._moves.due()

    def sequence_pays(self, num_blocks: int, recompute_s: float, return_chance: float) -> bool:
        """Like `move_pays` for a whole prefix of so many blocks, but without a try from time to time."""
        num_copies = max(_LEAST_SHARE, self.delay_share) + return_chance
        return self._pays(num_copies * num_blocks, return_chance * recompute_s)

    def read_pays(self, num_blocks: float, recompute_s: float) -> bool:
        """Return whether reading blocks is faster than recomputing their tokens, or is tried nevertheless."""
        return self._pays(num_blocks, recompute_s) or self._swaps.due()

    def return_pays(self, num_blocks: float, recompute_s: float) -> bool:
        """Return whether copying blocks back in is faster than recomputing their tokens in `recompute_s`."""
        return self._pays(num_blocks, recompute_s)

    def _pays(self, num_copies: float, recompute_s: float) -> bool:
        return self._num_copies < _KNOWN or num_copies * self.block_s < recompute_s
