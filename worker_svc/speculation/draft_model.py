"""Draft model: a smaller model with the same tokenizer proposes tokens.

Its layers are further layers of the KV cache, in the same blocks as those of the served model. So prefix sharing, block
copies and swaps include them. The draft model computes the chunks of prompts with the served model, and the tokens of a
decode row only when the row may have drafts. It then begins with the tokens that it has not computed yet, the last
known token among them, and computes one draft per pass.

A row without drafts thus leaves blocks without KV of the draft model, and another row may share them. So the number of
tokens that the draft model has computed is kept for each block. A row whose blocks lack some computes them first.

A draft is sampled with the row's own parameters and with the noise of its place, which the served model's token at this
place gets too. So both models tend to pick the same token, also at high temperatures.
"""

import dataclasses
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import sample
from shared.config import ConfigError, WorkerConfig
from worker_svc.device.upload import upload
from worker_svc.interface.arrays import IntArray
from worker_svc.interface.plan import Plan
from worker_svc.model.base import AttentionInputs, KVCache, Model
from worker_svc.model.loader import ModelDescription, load_model
from worker_svc.model.step_graphs import StepGraphs
from worker_svc.rows.table import RowTable

_MOST_BEHIND = 256
"""Most tokens of a row that one step makes up for; a row that lacks more gets drafts in a later step."""


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
    if model.state_bytes:
        raise ConfigError("draft_model: rejected drafts would remain in its recurrent state; use a model without one")
    if draft.vocab_size != description.vocab_size:
        raise ConfigError(
            f"draft_model: its vocabulary has {draft.vocab_size} tokens, but that of the model has"
            f" {description.vocab_size}; use a draft model with the same tokenizer"
        )
    if _vocabulary(draft.folder) != _vocabulary(description.folder):
        raise ConfigError(
            "draft_model: its tokens differ from those of the model; use a draft model with the same tokenizer"
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

    def settle(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Discard the KV of rejected drafts; return the range of positions of the accepted ones in `tokens`."""
        accepted = 0
        for draft, token in zip(self.drafts, tokens[self.known :], strict=False):
            if draft != token:
                break
            accepted += 1
        begin = self.computed - len(self.drafts)
        self.computed = begin + accepted
        self.drafts = []
        return begin, self.computed


class DraftModelProposer:
    """Proposer with a draft model."""

    def __init__(
        self,
        table: RowTable,
        model: Model,
        caches: Sequence[KVCache],
        device: torch.device,
        graphs: StepGraphs | None = None,
    ) -> None:
        """Create a proposer.

        Args:
            table: the rows.
            model: the draft model.
            caches: the KV blocks of the layers of `model`.
            device: the device of `model`.
            graphs: the captured passes of `model`; None: no pass is captured.
        """
        self._table = table
        self._model = model
        self._caches = caches
        self._device = device
        self._graphs = graphs
        self._rows: dict[int, _Row] = {}
        self._in_block = np.zeros(table.limits.num_blocks, np.int64)
        """`[num_blocks]`: tokens at the beginning of each block whose KV the draft model has computed."""
        self._in_host_block = np.zeros(table.limits.num_host_blocks, np.int64)
        """`[num_host_blocks]`: the same in host memory."""

    def follow(self, plan: Plan) -> None:
        for row in plan.leaves.tolist():
            if row in self._rows:
                self._settle(row)
                del self._rows[row]
        in_block = self._in_block
        if plan.swap_out is not None:
            self._in_host_block[plan.swap_out.targets] = in_block[plan.swap_out.sources]
        if plan.block_copies is not None:
            in_block[plan.block_copies.targets] = in_block[plan.block_copies.sources]
        in_block[plan.append_blocks] = 0
        if plan.swap_in is not None:
            in_block[plan.swap_in.targets] = self._in_host_block[plan.swap_in.sources]
        for admission in plan.admissions:
            full, rest = divmod(admission.num_computed_tokens, self._table.limits.block_size)
            blocks = admission.block_tables[0][full:]
            in_block[blocks[1 if rest else 0 :]] = 0
            if rest:
                in_block[blocks[0]] = min(in_block[blocks[0]], rest)

    def propose(self, rows: IntArray, most: IntArray) -> Sequence[Sequence[int]]:
        """See `Proposer.propose`. A row has `most` drafts, or none while the draft model lacks many of its tokens."""
        left = self._table.limits.max_tokens_per_step - len(rows)
        starts, ends, known = np.zeros_like(rows), np.zeros_like(rows), np.zeros_like(rows)
        ids = []
        for place, row in enumerate(rows.tolist()):
            tokens, state = self._settle(row), self._rows[row]
            start = state.computed
            more = min(len(tokens) - start - 1, _MOST_BEHIND, left)
            left -= more
            state.computed = end = start + 1 + more
            state.known = len(tokens)
            starts[place], ends[place], known[place] = start, end, len(tokens)
            ids.append(np.frombuffer(tokens[start:end], np.int32))
        logits = self._compute(rows, starts, ends, ids)
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
        """See `Proposer.prefill`. A row that lacks earlier tokens computes some of them in addition to its chunk."""
        generates = ~self._table.pooling.pools(rows)
        rows, lengths = rows[generates], lengths[generates]
        if not len(rows):
            return
        left = self._table.limits.max_tokens_per_step - int(lengths.sum())
        starts, ends = np.zeros_like(rows), np.zeros_like(rows)
        ids = []
        chunks = zip(rows.tolist(), self._table.num_computed[rows].tolist(), lengths.tolist(), strict=True)
        for place, (row, chunk_end, length) in enumerate(chunks):
            state = self._rows.get(row)
            if state is None:
                state = self._rows[row] = _Row(self._first_missing(row, chunk_end - length))
            start = state.computed
            more = min(chunk_end - length - start, _MOST_BEHIND, left)
            left -= more
            state.computed = end = start + length + more
            starts[place], ends[place] = start, end
            ids.append(np.frombuffer(self._table.known_tokens(row)[start:end], np.int32))
        self._compute(rows, starts, ends, ids)

    def clear(self) -> None:
        self._rows.clear()
        self._in_block.fill(0)
        self._in_host_block.fill(0)

    def _settle(self, row: int) -> "array[int]":
        """Count the accepted drafts of a row as computed, and return its known tokens."""
        tokens = self._table.known_tokens(row)
        begin, end = self._rows[row].settle(tokens)
        if end > begin:
            self._count(np.full(end - begin, row), np.arange(begin, end))
        return tokens

    def _first_missing(self, row: int, end: int) -> int:
        """Return the first position of a row, up to `end`, whose KV the draft model has not computed."""
        size = self._table.limits.block_size
        begins = np.arange(0, end, size)
        computed = self._in_block[self._table.tables.blocks_at(np.full_like(begins, row), begins // size)]
        incomplete = np.flatnonzero(computed < np.minimum(size, end - begins))
        return end if not len(incomplete) else int(begins[incomplete[0]] + computed[incomplete[0]])

    def _compute(
        self, rows: IntArray, starts: IntArray, ends: IntArray, ids: Sequence[npt.NDArray[np.int32]]
    ) -> torch.Tensor:
        """Compute known tokens of each row, `ids[i]` from position `starts[i]` to `ends[i]`.

        Returns:
            See `_forward`.
        """
        lengths = ends - starts
        logits = self._forward(rows, starts, lengths, upload(np.concatenate(ids), self._device))
        self._count(np.repeat(rows, lengths), _ranges(starts, lengths))
        return logits

    def _count(self, rows: IntArray, positions: IntArray) -> None:
        """Count tokens as computed in their blocks; the tokens before them are computed."""
        blocks, offsets = self._slots(rows, positions)
        np.maximum.at(self._in_block, blocks, offsets + 1)

    def _slots(self, rows: IntArray, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return the block of each token, and its place in the block."""
        index, offsets = np.divmod(positions, self._table.limits.block_size)
        return self._table.tables.blocks_at(rows, index), offsets

    def _forward(self, rows: IntArray, starts: IntArray, lengths: IntArray, ids: torch.Tensor) -> torch.Tensor:
        """Compute `lengths[i]` tokens of each row from position `starts[i]` on.

        Returns:
            The logits of each row's last token, `[len(rows), vocab_size]`, valid until the next call.
        """
        table, block_size = self._table, self._table.limits.block_size
        table.publish()
        query_start = np.concatenate(([0], np.cumsum(lengths)))
        positions = _ranges(starts, lengths)
        blocks, offsets = self._slots(np.repeat(rows, lengths), positions)
        slots = blocks * block_size + offsets
        ends = starts + lengths
        wide = upload(np.concatenate((positions, slots, rows, query_start[1:] - 1)), self._device)
        narrow = upload(np.concatenate((query_start, ends)).astype(np.int32), self._device)
        sizes = [len(positions), len(slots), len(rows), len(rows)]
        positions_, slots_, rows_, last = torch.split(wide, sizes)
        num_blocks = -(-int(ends.max()) // block_size)
        attention = AttentionInputs(
            slot_mapping=slots_,
            block_tables=table.tables.device_tables[:, :num_blocks].index_select(0, rows_),
            query_start=narrow[: len(query_start)],
            context_lens=narrow[len(query_start) :],
            max_query_len=int(lengths.max()),
            min_query_len=int(lengths.min()),
        )
        ids = ids.to(torch.int64)
        logits = None if self._graphs is None else self._graphs.forward(ids, positions_, attention, last)
        if logits is None:
            return self._model.forward(ids, positions_, attention, self._caches, last)
        return logits

    def _sample(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> torch.Tensor:
        """Sample a draft for each row at `positions`, `[len(rows)] int64`."""
        on_device = upload(positions.astype(np.int32), self._device)
        return sample(logits, self._table.sampling.tensors(rows, on_device))


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return the concatenated ranges of integers; range i has `lengths[i]` integers, from `starts[i]`."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])
