"""Step budget: how much of a prompt a step may compute beside decode rows, learned from the durations of steps.

A step with a chunk takes longer than one without, and the readers of the decode rows wait for it. Small chunks keep
this gap short. Large chunks compute more tokens per second, so prompts finish sooner. How much a chunk may hold depends
on the processor and the model. So two speeds are learned from answered steps: the time of a step that only decodes, and
the time that each budget token of a chunk adds. The largest chunks that keep the step within its target follow.

The budget depends on nothing but the times of the core's events, so the same events give the same plans.
"""

FIRST_CHUNKS = 128
"""Budget tokens of a step's chunks before the first measurement: enough for a useful one."""
PREFILL_FACTOR = 2.0
"""A step without decode rows may take the target times this. No reader waits for its next token then, but requests that
arrive wait for the step to end."""
_RISING_GAIN = 0.125
_FALLING_GAIN = 0.5
"""Weights of a new decode step that took longer, or less time, than the mean. A step may be disturbed, but no step is
faster than the device."""
_CHUNK_GAIN = 0.5
_LARGEST_CHANGE = 2.0
"""Largest factor between a learned time and a sample of it. A longer step was disturbed; it counts as this much."""
_LEAST_SHARE = 0.25
"""Minimum share of a step that counts as the time of its chunks. Full chunks are planned to take half or more."""


class StepBudget:
    """Learned speed of one worker; all times in seconds."""

    def __init__(self, itl_target_s: float) -> None:
        """Start without measurements.

        Args:
            itl_target_s: target time of a step with decode rows, seconds; 0: no target.
        """
        self._target_s = itl_target_s
        self._decode_s = 0.0
        """Smoothed duration of the steps that only decode; 0: not measured."""
        self._token_s = 0.0
        """Smoothed time of a budget token in chunks; 0: not measured."""

    def for_chunks(self, *, decodes: bool) -> int | None:
        """Return the most budget tokens that the chunks of the next step may take, at least 1; None: no limit.

        Args:
            decodes: whether decode rows are in the step.
        """
        if not self._target_s:
            return None
        if not self._token_s:
            return FIRST_CHUNKS
        target_s = self._target_s if decodes else PREFILL_FACTOR * self._target_s
        return affordable_tokens(target_s, self._decode_s, self._token_s)

    def measured(self, duration: float, *, decodes: bool, chunks: int) -> None:
        """Record the duration of an answered step.

        Args:
            duration: from the start of the step to its answer.
            decodes: whether decode rows were in the step.
            chunks: budget tokens of its chunks.
        """
        if not self._target_s:
            return
        if not chunks:
            if decodes:
                gain = _RISING_GAIN if duration > self._decode_s else _FALLING_GAIN
                self._decode_s = _smoothed(self._decode_s, duration, gain)
            return
        budget = self.for_chunks(decodes=decodes)
        assert budget is not None
        # The time of a few tokens is lost in the noise of the step's.
        if chunks >= min(FIRST_CHUNKS, budget) // 2:
            chunks_s = max(duration - self._decode_s, _LEAST_SHARE * duration)
            self._token_s = _smoothed(self._token_s, chunks_s / chunks, _CHUNK_GAIN)


def affordable_tokens(target_s: float, decode_s: float, token_s: float) -> int:
    """Return how many budget tokens fit into the step's time, at least 1.

    The step may take `target_s`. Where decode rows alone take more than half of that, it may take twice as long as
    they do, so that prompts get at least half of the worker's time.

    Args:
        target_s: longest time that the step should take.
        decode_s: time of the step without chunks.
        token_s: time that each budget token adds.
    """
    return max(1, int((max(target_s, 2 * decode_s) - decode_s) / token_s))


def _smoothed(mean: float, sample: float, gain: float) -> float:
    if not mean:
        return sample
    return mean + gain * (min(max(sample, mean / _LARGEST_CHANGE), mean * _LARGEST_CHANGE) - mean)
