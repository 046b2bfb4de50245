"""Last sampled tokens on the host, for rows whose next token depends on them.

With a grammar, or with bad words of several tokens, token N must be known before token N + 1 is sampled. The tokens of
a step with such rows are therefore copied to the host. Only the next step's sampling waits for this copy; its forward
pass is already running.
"""

import torch

from worker_svc.device.accelerator import Accelerator, Event
from worker_svc.interface.arrays import IntArray


class HostTokens:
    """Tokens of one step that are being copied to the host."""

    def __init__(
        self, tokens: torch.Tensor, rows: IntArray, generations: IntArray, accelerator: Accelerator | None
    ) -> None:
        """Start the copy.

        Args:
            tokens: `[S] int32` on the device, negative for rows that failed.
            rows: `[S]`, the rows of the tokens.
            generations: `[S]`, the generations of the rows.
            accelerator: the device's accelerator; None on a CPU.
        """
        self.rows = rows
        self.generations = generations
        self._copied: Event | None = None
        self._tokens = tokens
        if accelerator is not None:
            self._tokens = accelerator.pinned(tuple(tokens.shape), tokens.dtype)
            # Copy on the compute stream, so that the copy waits only for the work that produces the tokens.
            self._tokens.copy_(tokens, non_blocking=True)
            self._copied = accelerator.event()
            self._copied.record()

    def wait(self) -> list[tuple[int, int, int]]:
        """Wait for the copy and return (row, generation, token) of each row."""
        if self._copied is not None:
            self._copied.synchronize()
        columns = (self.rows.tolist(), self.generations.tolist(), self._tokens.tolist())
        return list(zip(*columns, strict=True))
