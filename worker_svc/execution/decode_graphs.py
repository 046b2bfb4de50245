"""Decode steps as captured CUDA graphs.

Launching a decode step's kernels one by one takes the host longer than the device needs to run them. A step in which
every row decodes is therefore captured once per *bucket* (a number of lanes to which the batch is padded), and then
enqueued with one call. A graph reads its inputs from tensors at fixed addresses (`DecodeLanes`). The graph's first
kernel computes these inputs on the device, so a graph can be used for every step of its bucket.

For steps with more rows than the largest bucket, the kernels are launched one by one. `step_graphs` handles steps with
prompt chunks or drafts. All graphs share one memory pool. The sampler is not captured, because its work depends on the
step's rows.

A `transformers` decoder may contain operations that a capture does not allow, such as reading a value back to the host.
It may also capture a value that changes between steps. A trial after the capture therefore compares the smallest graph
with the model itself. Graphs with collectives between ranks get this trial, too.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kernels.decode_inputs import DecodeInputs, prepare_decode
from shared.logging import get_logger
from worker_svc.device.accelerator import Capture, Graph
from worker_svc.device.state import DeviceState
from worker_svc.interface.arrays import IntArray
from worker_svc.model.base import AttentionInputs, KVCache, Model
from worker_svc.ranks.group import Group
from worker_svc.rows.table import RowTable

_MOST_LANES = 512
_TRIAL_TOKENS = 3
_TRIAL_TOLERANCE = 0.01
"""Maximum difference of two logits in a trial, relative to the largest logit. Both sides run the same kernels."""
_DENSE_UNTIL = 32
"""Buckets are powers of two up to this size, and multiples of this size beyond it."""


def buckets(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of lanes to capture graphs for, ascending: 1, 2, 4, 8, 16, 32, 64, 96, ...

    The last bucket holds `max_rows`, up to a limit. In a batch of up to 32 rows, at most half is padding. This is
    cheap, because a step with one row takes as long as a step with sixteen rows. A larger batch has at most 31 lanes of
    padding.
    """
    most = min(max_rows, _MOST_LANES)
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2 if sizes[-1] < _DENSE_UNTIL else sizes[-1] + _DENSE_UNTIL)
    return tuple(sizes)


class DecodeLanes:
    """Decode rows and their computed tokens on the device, and the step inputs computed from them."""

    def __init__(self, table: RowTable, state: DeviceState, sizes: Sequence[int]) -> None:
        self._table = table
        self._state = state
        self._sizes = tuple(sizes)
        most = self._sizes[-1]
        device = table.last_token.device
        self._rows, self._first_row = state.column(most)
        self._computed, self._first_computed = state.column(most)
        self._rows.fill_(-1)
        # Membership of the table when the lanes were last updated, or -1 if the lanes are outdated.
        self._membership = -1
        self.query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        wide = torch.zeros(4, most, dtype=torch.int64, device=device)
        self.inputs = DecodeInputs(
            input_ids=wide[0],
            positions=wide[1],
            slot_mapping=wide[2],
            rows=wide[3],
            context_lens=torch.zeros(most, dtype=torch.int32, device=device),
            block_tables=torch.zeros(most, table.limits.max_blocks_per_row, dtype=torch.int32, device=device),
        )

    @staticmethod
    def state_words(sizes: Sequence[int]) -> int:
        """Return the number of `DeviceState` words that the lanes need."""
        return 2 * sizes[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bucket sizes, ascending."""
        return self._sizes

    def bucket(self, num_rows: int) -> int | None:
        """Return the smallest bucket for `num_rows` rows; None if there is none."""
        return next((size for size in self._sizes if size >= num_rows), None)

    def follow(self, rows: IntArray, computed: IntArray, bucket: int) -> None:
        """Record the changes that set the lanes to these rows.

        No change is needed while the same rows decode, because the device counts their tokens itself.

        Args:
            rows: `[n]`, the rows that decode.
            computed: `[n]`, each row's number of tokens whose KV is computed before this step.
            bucket: number of lanes to fill; lanes beyond the rows are emptied.
        """
        if self._membership == self._table.membership:
            return
        self._membership = self._table.membership
        places = np.arange(bucket)
        lanes = np.full(bucket, -1, np.int32)
        lanes[: len(rows)] = rows
        self._state.change(self._first_row + places, lanes)
        self._state.change(self._first_computed + places[: len(rows)], computed.astype(np.int32))

    def fall_behind(self) -> None:
        """Mark the lanes as outdated, because a step without them advanced the rows."""
        self._membership = -1

    def compute_inputs(self, bucket: int) -> DecodeInputs:
        """Enqueue the computation of the next step's inputs for the first `bucket` lanes."""
        inputs = self.inputs.lanes(bucket)
        table = self._table
        prepare_decode(
            self._rows[:bucket],
            self._computed[:bucket],
            table.last_token,
            table.tables.device_tables,
            table.limits.block_size,
            inputs,
        )
        return inputs

    def pretend(self, token: int) -> None:
        """For a trial, set the first lane to row 0 with `token` computed tokens and last token `token`."""
        self._rows[0], self._computed[0], self._table.last_token[0] = 0, token, token

    def forget(self) -> None:
        """Undo `pretend`."""
        self._rows[0], self._computed[0], self._table.last_token[0] = -1, 0, 0

    def attention(self, lanes: int) -> AttentionInputs:
        """Return the attention inputs of the first `lanes` lanes."""
        inputs = self.inputs
        return AttentionInputs(
            slot_mapping=inputs.slot_mapping[:lanes],
            block_tables=inputs.block_tables[:lanes],
            query_start=self.query_start[: lanes + 1],
            context_lens=inputs.context_lens[:lanes],
            max_query_len=1,
        )


class DecodeGraphs:
    """Captured graphs, one per bucket."""

    def __init__(
        self, capture: Capture, lanes: DecodeLanes, model: Model, caches: Sequence[KVCache], group: Group
    ) -> None:
        self._capture = capture
        self._group = group
        self._lanes = lanes
        self._model = model
        self._caches = caches
        self._graphs: dict[int, tuple[Graph, torch.Tensor]] = {}

    def capture(self) -> None:
        """Capture all graphs with empty lanes, the largest first, because the others then fit into its memory.

        Raises: RuntimeError: the device refuses a capture, or the graph computes different logits than the model.
        """
        for bucket in reversed(self._lanes.sizes):
            self._graphs[bucket] = self._capture(partial(self._compute, bucket))
        if not self._model.capturable or self._group.size > 1:
            self._try()
        get_logger().info("decode graphs captured", buckets=list(self._lanes.sizes))

    def forward(self, bucket: int, num_rows: int) -> torch.Tensor:
        """Enqueue the step of the first `num_rows` lanes.

        Returns:
            Logits `[num_rows, vocab_size]`, valid until the next call.
        """
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits[:num_rows]

    def _try(self) -> None:
        """Compare the smallest graph with the model, for tokens and positions that the capture has not seen.

        This writes row 0's KV into block 0, which no row reads before it has written its own KV.
        """
        bucket = self._lanes.sizes[0]
        wrong = 0
        for token in range(1, _TRIAL_TOKENS + 1):  # All of them, because the other ranks compute them, too.
            self._lanes.pretend(token)
            expected = self._compute(bucket).clone()
            self._lanes.pretend(token)
            difference = (self.forward(bucket, 1) - expected[:1]).abs().max()
            self._lanes.forget()
            if not difference <= _TRIAL_TOLERANCE * expected[:1].abs().max():
                wrong = wrong or token
        if not self._group.agrees(not wrong):
            reason = f"token {wrong}" if wrong else "on another rank"
            raise RuntimeError(f"the graph computes different logits than the model ({reason})")

    def _compute(self, bucket: int) -> torch.Tensor:
        inputs = self._lanes.compute_inputs(bucket)
        return self._model.forward(
            inputs.input_ids, inputs.positions, self._lanes.attention(bucket), self._caches, None
        )
