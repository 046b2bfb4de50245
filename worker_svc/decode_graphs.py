"""Decode steps as captured graphs.

Launching the kernels of a decode step one by one takes the host longer than the device needs to run them. So a step in
which every row decodes is captured once per *bucket*, a number of lanes that the batch is padded to, and then enqueued
by one call. A graph is fixed: it reads what it needs from tensors that stay where they are (`DecodeLanes`) and starts
by computing its inputs on the device, so that nothing of one step is baked into it.

Steps with a chunk of a prompt, and more rows than the largest bucket, are computed as they come: such steps are long
enough to launch kernels in. All graphs share one pool of memory. The sampler stays outside: which of its work a step
needs depends on its rows.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kernels.decode_inputs import DecodeInputs, prepare_decode
from shared.logging import get_logger
from worker_svc.accelerator import Accelerator, Graph
from worker_svc.block_tables import IntArray
from worker_svc.device_state import DeviceState
from worker_svc.model.base import AttentionInputs, KVCache, Model
from worker_svc.rows import RowTable

_MOST_LANES = 512
_DENSE_UNTIL = 32
"""Powers of two up to here, multiples of it from here on."""


def buckets(max_rows: int) -> tuple[int, ...]:
    """The numbers of lanes that graphs are captured for, ascending: 1, 2, 4, 8, 16, 32, 64, 96, ... The last one holds
    `max_rows`, or as many rows as graphs are kept for.

    Padding costs at most half of a small batch, where a step costs the same for one row as for sixteen, and at most 31
    lanes of a large one.
    """
    most = min(max_rows, _MOST_LANES)
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2 if sizes[-1] < _DENSE_UNTIL else sizes[-1] + _DENSE_UNTIL)
    return tuple(sizes)


class DecodeLanes:
    """Which rows decode and how far they are, as the device knows it, and the inputs computed from that."""

    def __init__(self, table: RowTable, state: DeviceState, sizes: Sequence[int]) -> None:
        self._table = table
        self._state = state
        self._sizes = tuple(sizes)
        most = self._sizes[-1]
        device = table.last_token.device
        self._rows, self._first_row = state.column(most)
        self._computed, self._first_computed = state.column(most)
        self._rows.fill_(-1)
        self._membership = -1  # of the table when the device's lanes were last right; -1: they are not
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
        """Words of `DeviceState` that lanes take."""
        return 2 * sizes[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets."""
        return self._sizes

    def bucket(self, num_rows: int) -> int | None:
        """The smallest bucket for so many rows; None: there is none."""
        return next((size for size in self._sizes if size >= num_rows), None)

    def follow(self, rows: IntArray, computed: IntArray, bucket: int) -> None:
        """Notes what the device's lanes lack to be these rows, with so many tokens computed; nothing, as long as the
        same rows go on decoding: the device counts their tokens itself.

        Args:
            rows: `[n]`, the rows that decode.
            computed: `[n]`, tokens of each whose KV is computed before this step.
            bucket: lanes to fill; those beyond the rows are emptied.
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
        """Rows have advanced in a step that the lanes took no part in."""
        self._membership = -1

    def compute_inputs(self, bucket: int) -> DecodeInputs:
        """Enqueues the computation of the next step's inputs for the first `bucket` lanes."""
        inputs = self.inputs.lanes(bucket)
        table = self._table
        prepare_decode(
            self._rows[:bucket],
            self._computed[:bucket],
            table.last_token,
            table.tables[0].device_tables,
            table.limits.block_size,
            inputs,
        )
        return inputs

    def attention(self, lanes: int) -> AttentionInputs:
        """The inputs as attention takes them."""
        inputs = self.inputs
        return AttentionInputs(
            slot_mapping=inputs.slot_mapping[:lanes],
            block_tables=inputs.block_tables[:lanes],
            query_start=self.query_start[: lanes + 1],
            context_lens=inputs.context_lens[:lanes],
            max_query_len=1,
        )


class DecodeGraphs:
    """One graph per bucket."""

    def __init__(self, accelerator: Accelerator, lanes: DecodeLanes, model: Model, caches: Sequence[KVCache]) -> None:
        self._accelerator = accelerator
        self._lanes = lanes
        self._model = model
        self._caches = caches
        self._graphs: dict[int, tuple[Graph, torch.Tensor]] = {}

    def capture(self) -> None:
        """Captures all of them, the largest first: the others fit into its memory. No lane has a row yet."""
        for bucket in reversed(self._lanes.sizes):
            self._graphs[bucket] = self._accelerator.capture(partial(self._compute, bucket))
        get_logger().info("decode graphs captured", buckets=list(self._lanes.sizes))

    def forward(self, bucket: int, num_rows: int) -> torch.Tensor:
        """Enqueues the step of the first `num_rows` lanes; returns their logits `[num_rows, vocab_size]`, which last
        until the next call."""
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits[:num_rows]

    def _compute(self, bucket: int) -> torch.Tensor:
        inputs = self._lanes.compute_inputs(bucket)
        return self._model.forward(
            inputs.input_ids, inputs.positions, self._lanes.attention(bucket), self._caches, None
        )
