"""Draft model: a smaller model with the same tokenizer proposes tokens.

Its layers are further layers of the KV cache, in the same blocks as those of the served model. So prefix sharing, block
copies and swaps include them without code of their own. The draft model computes the chunks of prompts with the served
model, and the tokens of a decode row only when the row may have drafts. It then begins with the tokens that it has not
computed yet, the last known token among them, and computes one draft per pass.

A draft is sampled with the row's own parameters and with the noise of its place, which the served model's token at this
place gets too. So both models tend to pick the same token, also at high temperatures.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kernels.sampling import sample
from shared.config import ConfigError, WorkerConfig
from worker_svc.device.upload import upload
from worker_svc.interface.arrays import IntArray
from worker_svc.model.base import AttentionInputs, KVCache, Model
from worker_svc.model.loader import ModelDescription, load_model
from worker_svc.rows.table import RowTable

_MOST_BEHIND = 256
"""Tokens that the draft model computes before it proposes; a row that lacks more gets drafts in a later step."""


def load_draft_model(config: WorkerConfig, description: ModelDescription, device: torch.device) -> Model:
    """Load the draft model for the served model that `description` describes.

    Raises:
        ConfigError: the draft model cannot be loaded, or does not fit the served model.
    """
    own = dataclasses.replace(
        config, model=config.draft_model, dtype=description.dtype_name, max_model_len=description.max_model_len
    )
    try:
        model, draft = load_model(own, device)
    except ConfigError as error:
        raise ConfigError(f"draft_model: {error}") from None
    if draft.vocab_size != description.vocab_size:
        raise ConfigError(
            f"draft_model: its vocabulary of {draft.vocab_size} tokens is not that of the model, with"
            f" {description.vocab_size}; use a model with the same tokenizer"
        )
    if _vocabulary(draft.folder) != _vocabulary(description.folder):
        raise ConfigError(
            "draft_model: its tokenizer.json has other tokens than that of the model; use one with the same tokenizer"
        )
    return model


def _vocabulary(folder: Path) -> object:
    """Return the mapping of a checkpoint's tokenizer to token IDs; None without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = json.loads(path.read_text("utf-8"))
    return tokenizer.get("model"), tokenizer.get("added_tokens")


@dataclass(slots=True)
class _Row:
    """State of one row."""

    computed: int
    """Tokens whose KV the draft model has computed, drafts included."""
    known: int = 0
    """Number of known tokens at the last proposal, after which the drafts come."""
    drafts: list[int] = field(default_factory=list)
    """The drafts whose KV is computed."""

    def settle(self, tokens: Sequence[int]) -> None:
        """Forget the KV of drafts that are not among the row's `tokens`."""
        accepted = 0
        for draft, token in zip(self.drafts, tokens[self.known :], strict=False):
            if draft != token:
                break
            accepted += 1
        self.computed -= len(self.drafts) - accepted
        self.drafts = []


class DraftModelProposer:
    """Proposer with a draft model."""

    def __init__(self, table: RowTable, model: Model, caches: Sequence[KVCache], device: torch.device) -> None:
        """Create a proposer; `caches` are the KV blocks of the layers of `model`."""
        self._table = table
        self._model = model
        self._caches = caches
        self._device = device
        self._rows: dict[int, _Row] = {}

    def propose(self, rows: IntArray, most: IntArray) -> Sequence[Sequence[int]]:
        """See `Proposer.propose`. A row has `most` drafts, or none while the draft model lacks many of its tokens."""
        starts, ends, known = np.zeros_like(rows), np.zeros_like(rows), np.zeros_like(rows)
        ids = []
        for place, row in enumerate(rows.tolist()):
            tokens, state = self._table.known_tokens(row), self._rows[row]
            state.settle(tokens)
            start = state.computed
            state.computed = end = min(len(tokens), start + _MOST_BEHIND)
            state.known = len(tokens)
            starts[place], ends[place], known[place] = start, end, len(tokens)
            ids.append(np.frombuffer(tokens[start:end], np.int32))
        logits = self._forward(rows, starts, ends - starts, upload(np.concatenate(ids), self._device))
        drafting = np.flatnonzero(ends == known)
        logits = logits[upload(drafting, self._device)]
        passes: list[tuple[IntArray, torch.Tensor]] = []
        while len(drafting):
            positions = known[drafting] + len(passes)
            picked = self._sample(logits, rows[drafting], positions)
            passes.append((drafting, picked))
            going = np.flatnonzero(most[drafting] > len(passes))
            drafting = drafting[going]
            if len(drafting):
                inputs = picked[upload(going, self._device)]
                logits = self._forward(rows[drafting], positions[going], np.ones_like(drafting), inputs)
        drafts: list[list[int]] = [[] for _ in rows]
        for places, picked in passes:
            for place, token in zip(places.tolist(), picked.tolist(), strict=True):
                drafts[place].append(token)
        for row, tokens_ in zip(rows.tolist(), drafts, strict=True):
            state = self._rows[row]
            state.drafts = tokens_[:-1]
            state.computed += len(state.drafts)
        return drafts

    def prefill(self, rows: IntArray, lengths: IntArray) -> None:
        """See `Proposer.prefill`. Tokens before a row's first chunk have KV from the row that shared or swapped it."""
        generates = ~self._table.pooling.pools(rows)
        rows, lengths = rows[generates], lengths[generates]
        if not len(rows):
            return
        ends = self._table.num_computed[rows]
        ids = []
        for row, end, length in zip(rows.tolist(), ends.tolist(), lengths.tolist(), strict=True):
            ids.append(np.frombuffer(self._table.known_tokens(row)[end - length : end], np.int32))
            self._rows[row] = _Row(end)
        self._forward(rows, ends - lengths, lengths, upload(np.concatenate(ids), self._device))

    def leave(self, rows: IntArray) -> None:
        """See `Proposer.leave`."""
        for row in rows.tolist():
            self._rows.pop(row, None)

    def clear(self) -> None:
        """See `Proposer.clear`."""
        self._rows.clear()

    def _forward(self, rows: IntArray, starts: IntArray, lengths: IntArray, ids: torch.Tensor) -> torch.Tensor:
        """Compute `lengths[i]` tokens of each row from position `starts[i]` on.

        Returns:
            The logits of each row's last token, `[len(rows), vocab_size]`.
        """
        table, block_size = self._table, self._table.limits.block_size
        table.publish()
        query_start = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.repeat(starts - query_start[:-1], lengths) + np.arange(query_start[-1])
        index, offset = np.divmod(positions, block_size)
        slots = table.tables[0].blocks_at(np.repeat(rows, lengths), index) * block_size + offset
        ends = starts + lengths
        wide = upload(np.concatenate((positions, slots, rows, query_start[1:] - 1)), self._device)
        narrow = upload(np.concatenate((query_start, ends)).astype(np.int32), self._device)
        sizes = [len(positions), len(slots), len(rows), len(rows)]
        positions_, slots_, rows_, last = torch.split(wide, sizes)
        num_blocks = -(-int(ends.max()) // block_size)
        return self._model.forward(
            ids.to(torch.int64),
            positions_,
            AttentionInputs(
                slot_mapping=slots_,
                block_tables=table.tables[0].device_tables[:, :num_blocks].index_select(0, rows_),
                query_start=narrow[: len(query_start)],
                context_lens=narrow[len(query_start) :],
                max_query_len=int(lengths.max()),
                min_query_len=int(lengths.min()),
            ),
            self._caches,
            last,
        )

    def _sample(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> torch.Tensor:
        """Sample a draft for each row at `positions`, `[len(rows)] int64`."""
        on_device = upload(positions.astype(np.int32), self._device)
        return sample(logits, self._table.sampling.tensors(rows, on_device))
