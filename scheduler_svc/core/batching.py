"""When a worker takes new requests in: the batching modes that the literature compares.

* `continuous` (Orca): at every step.
* `static`: only into an empty worker, once `max_batch_size` requests wait or the first of them has waited
  `max_wait_s`; then not until all of them have finished.
* `dynamic`: as static, and a batch is also full at `max_tokens_per_batch` prompt tokens.

All three run on the same engine; a gate is all that differs. `scheduler_delay_factor` (vLLM) makes continuous batching
collect a little: while requests run, admission waits until the last admission is as long ago as the newest prefill
step took, times the factor.
"""

from dataclasses import dataclass

BATCHING_MODES = ("continuous", "static", "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingLimits:
    """Limits of the gate; times in seconds, 0 tokens: no limit."""

    mode: str = "continuous"
    max_batch_size: int = 16
    max_wait_s: float = 0.05
    max_tokens_per_batch: int = 0
    delay_factor: float = 0.0


class BatchGate:
    """The gate of one worker."""

    def __init__(self, limits: BatchingLimits) -> None:
        self._limits = limits
        self._collecting_since: float | None = None
        self._seats = 0
        """Requests that the present batch still takes; static and dynamic only."""
        self._tokens = 0
        self._last_admission: float | None = None
        self._prefill_s = 0.0

    def is_open(self, *, num_running: int, num_waiting: int, now: float) -> bool:
        """Whether a request may be admitted now; there is at least one waiting."""
        limits = self._limits
        if limits.mode == "continuous":
            return (
                not limits.delay_factor
                or not num_running
                or self._last_admission is None
                or now - self._last_admission >= limits.delay_factor * self._prefill_s
            )
        if num_running == 0 and self._seats == 0:
            if self._collecting_since is None:
                self._collecting_since = now
            if num_waiting < limits.max_batch_size and now - self._collecting_since < limits.max_wait_s:
                return False
            self._collecting_since = None
            self._seats = limits.max_batch_size
            self._tokens = 0
        return self._seats > 0

    def admits(self, num_tokens: int) -> bool:
        """Whether the batch still takes a request of so many prompt tokens; its first is always taken."""
        limits = self._limits
        if limits.mode != "dynamic" or not limits.max_tokens_per_batch or not self._tokens:
            return True
        return self._tokens + num_tokens <= limits.max_tokens_per_batch

    def admitted(self, num_tokens: int, now: float) -> None:
        """A request was admitted."""
        self._last_admission = now
        self._seats -= 1
        self._tokens += num_tokens

    def close(self) -> None:
        """The batch is complete: nobody else was there, or it is full."""
        self._seats = 0

    def prefill_measured(self, duration: float) -> None:
        """A step with prompt tokens took `duration`."""
        self._prefill_s = duration
