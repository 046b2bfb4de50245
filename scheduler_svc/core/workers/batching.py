"""Batching modes: when a worker takes new requests.

* `continuous` (Orca): at every step.
* `static`: requests are admitted only into an empty worker, once `max_batch_size` requests wait or the first of them
  has waited `max_wait_s`. After that, no request is admitted until the whole batch has finished.
* `dynamic`: like static, but a batch is also full at `max_tokens_per_batch` prompt tokens.

All three modes run on the same engine and differ only in this gate.

`scheduler_delay_factor` (vLLM) delays admission under continuous batching. While requests run, the time since the last
admission must reach the expected time of the newest prefill step, times the factor.
"""

from scheduler_svc.core.interface.config import BatchingLimits


class BatchGate:
    """The gate of one worker: it decides when requests may be admitted."""

    def __init__(self, limits: BatchingLimits) -> None:
        self._limits = limits
        self.is_always_open = limits.mode == "continuous" and not limits.delay_factor
        """Whether requests may be admitted at every step."""
        self._collecting_since: float | None = None
        self._seats = 0
        """Number of requests that the current batch can still accept. Static and dynamic modes only."""
        self._tokens = 0
        self._last_admission: float | None = None

    @property
    def opens_at(self) -> float | None:
        """When the batch that is being collected starts, even if it is not full; None if none is being collected."""
        since = self._collecting_since
        return None if since is None else since + self._limits.max_wait_s

    def may_open(self, num_running: int) -> bool:
        """Return whether a request assigned to the worker would be admitted, given that it has room."""
        return self._limits.mode == "continuous" or num_running == 0 or self._seats > 0

    def is_open(
        self, *, num_running: int, num_waiting: int, now: float, prefill_s: float, num_assigned: int = 0
    ) -> bool:
        """Return whether a request may be admitted now; at least one request waits.

        Assigned requests open the gate, because they have already waited in the batch of another worker.

        Args:
            num_running: requests that run on the worker.
            num_waiting: requests that may start.
            now: the time, s.
            prefill_s: expected time of a step with as many prompt tokens as the newest prefill step, s.
            num_assigned: those of the waiting requests that are assigned to the worker.
        """
        limits = self._limits
        if limits.mode == "continuous":
            return (
                not limits.delay_factor
                or not num_running
                or self._last_admission is None
                or now - self._last_admission >= limits.delay_factor * prefill_s
            )
        if num_running == 0 and self._seats == 0:
            if self._collecting_since is None:
                self._collecting_since = now
            is_collected = num_assigned or num_waiting >= limits.max_batch_size
            if not is_collected and now < self._collecting_since + limits.max_wait_s:
                return False
            self._collecting_since = None
            self._seats = limits.max_batch_size
            self._tokens = 0
        return self._seats > 0

    def admits(self, num_tokens: int, *, num_running: int, now: float) -> bool:
        """Return whether the batch takes a request with `num_tokens` prompt tokens; if not, the batch is complete.

        The first request of a batch is always taken.
        """
        limits = self._limits
        if limits.mode != "dynamic" or not limits.max_tokens_per_batch or not self._tokens:
            return True
        if self._tokens + num_tokens <= limits.max_tokens_per_batch:
            return True
        self.close()
        if not num_running:
            self._collecting_since = now  # The batch has already finished. Start collecting the next one.
        return False

    def admitted(self, num_tokens: int, now: float) -> None:
        """Record that a request was admitted through the open gate."""
        assert self._limits.mode == "continuous" or self._seats > 0, "admitted through a closed gate"
        self._last_admission = now
        self._seats -= 1
        self._tokens += num_tokens

    def close(self) -> None:
        """Complete the batch, because no other request waits or it is full."""
        self._seats = 0
