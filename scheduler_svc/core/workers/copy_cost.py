"""Copy cost: the time that a worker takes to copy a block between device and host, or to read it from disk.

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
        self._num_copies = 0
        self._swaps, self._moves = _Retries(), _Retries()

    def measured(self, num_blocks: int, seconds: float) -> None:
        """Record that the worker has copied blocks."""
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

        Args:
            recompute_s: time to compute the block, s.
            return_chance: chance that a request continues with it.
        """
        return self._pays(1 + return_chance, return_chance * recompute_s) or self._moves.due()

    def read_pays(self, num_blocks: float, recompute_s: float) -> bool:
        """Return whether reading blocks is faster than recomputing their tokens, or is tried nevertheless."""
        return self._pays(num_blocks, recompute_s) or self._swaps.due()

    def return_pays(self, num_blocks: float, recompute_s: float) -> bool:
        """Return whether copying blocks back in is faster than recomputing their tokens in `recompute_s`."""
        return self._pays(num_blocks, recompute_s)

    def _pays(self, num_copies: float, recompute_s: float) -> bool:
        return self._num_copies < _KNOWN or num_copies * self.block_s < recompute_s
