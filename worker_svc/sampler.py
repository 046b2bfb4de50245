"""From logits to tokens: the parameters of the rows that sample, gathered and kept for as long as the rows stay."""

from dataclasses import replace

import numpy as np
import torch

from kernels.sampling import SamplingTensors, nonfinite_rows, sample
from worker_svc.batch import StepBatch
from worker_svc.device import upload
from worker_svc.rows import RowTable

FAILED = -1
"""What stands in the place of a token when the row's logits are not finite."""


class Sampler:
    """Samples one token for each row of a batch that samples."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._gathered_for: tuple[int, bytes] = (-1, b"")
        self._gathered: SamplingTensors | None = None

    def sample(self, logits: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Tokens `[S] int32` from logits `[S, vocab_size]`, `FAILED` for rows whose logits are not finite.

        The tokens become the rows' `last_token`.
        """
        params = self._params(batch)
        if params.any_random:
            params = replace(params, position=batch.sample_positions)
        tokens = sample(logits, params)
        self._table.last_token[batch.sample_rows_on_device] = tokens
        return tokens.masked_fill(nonfinite_rows(logits), FAILED).to(torch.int32)

    def _params(self, batch: StepBatch) -> SamplingTensors:
        """The rows' parameters; a step that changes the rows changes `membership`, so that both together are a key."""
        key = (self._table.membership, batch.sample_rows.tobytes())
        if self._gathered is None or self._gathered_for != key:
            self._gathered, self._gathered_for = self._gather(batch), key
        return self._gathered

    def _gather(self, batch: StepBatch) -> SamplingTensors:
        columns, rows = self._table.sampling, batch.sample_rows
        random = columns.temperature[rows] > 0
        truncated = (columns.top_k[rows] > 0) | (columns.top_p[rows] < 1) | (columns.min_p[rows] > 0)
        floats = upload(
            np.concatenate((columns.temperature[rows], columns.top_p[rows], columns.min_p[rows])),
            self._device,
        )
        ints = upload(np.concatenate((columns.top_k[rows], columns.choice[rows])), self._device)
        temperature, top_p, min_p = floats.chunk(3)
        top_k, choice = ints.chunk(2)
        return SamplingTensors(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=upload(columns.seed[rows], self._device),
            choice=choice,
            position=batch.sample_positions,
            any_random=bool(random.any()),
            any_truncation=bool((random & truncated).any()),
        )
