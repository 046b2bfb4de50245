"""The newest tokens on the host, for rows whose next token depends on them in ways that the device cannot decide.

A grammar, or a word of several tokens, must see token N before token N + 1 can be chosen. The tokens of a step with
such rows are copied to the host; the next step's sampling waits for that copy, and for nothing else: its forward pass
is under way by then.
"""

import torch

from worker_svc.accelerator import Accelerator, Event
from worker_svc.block_tables import IntArray


class HostTokens:
    """The tokens of one step on their way to the host."""

    def __init__(
        self, tokens: torch.Tensor, rows: IntArray, generations: IntArray, accelerator: Accelerator | None
    ) -> None:
        """`tokens` `[S] int32` on the device, negative for rows that failed; of `rows` `[S]` in these uses."""
        self.rows = rows
        self.generations = generations
        self._copied: Event | None = None
        self._tokens = tokens
        if accelerator is not None:
            self._tokens = accelerator.pinned(tuple(tokens.shape), tokens.dtype)
            # On the stream of the computation itself: all that this stream has before it is what gave the tokens.
            self._tokens.copy_(tokens, non_blocking=True)
            self._copied = accelerator.event()
            self._copied.record()

    def wait(self) -> list[tuple[int, int, int]]:
        """(row, generation, token) of each; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        columns = (self.rows.tolist(), self.generations.tolist(), self._tokens.tolist())
        return list(zip(*columns, strict=True))
