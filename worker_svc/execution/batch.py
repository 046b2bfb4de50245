"""One step's flat batch, built from the row table.

Decode rows come first, ascending, with one token each. Rows with a prefill chunk follow, ascending. The host uploads
positions, slots and lengths. The input tokens of decode rows are read from `last_token` on the device, where the
previous step wrote them. A decode row with drafts is like a chunk of several tokens: its base token, which the host
knows, and its drafts. It follows the other decode rows and samples at every one of its tokens.

For a captured decode step the host uploads nothing: the device computes the inputs from its lanes (`decode_graphs`).
For a captured step with chunks or drafts, `step_graphs` copies the batch's tensors into those of the graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.device.upload import upload
from worker_svc.execution.decode_graphs import DecodeLanes
from worker_svc.interface.arrays import NO_ROWS, Int32Array, IntArray
from worker_svc.interface.errors import PlanError
from worker_svc.memory.kv_groups import KVGroups
from worker_svc.memory.kv_views import window_slots, window_tables
from worker_svc.model.base import AttentionInputs
from worker_svc.model.recurrent import StateSave
from worker_svc.outputs.pooling import PooledPart
from worker_svc.outputs.scores import PromptPart
from worker_svc.rows.table import RowTable
from worker_svc.speculation.drafts import NO_DRAFTS, Drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The drafts of a step and how they are verified: S sampled tokens in Q rows, grouped by row."""

    firsts: IntArray
    """`[Q]`: index of each row's first sampled token; rows ascending."""
    num_drafts: IntArray
    """`[Q]`: drafts of each row."""
    expected: IntArray
    """`[S]`: the draft that a sampled token must equal for the row's next token to count; -1 at a row's last index."""

    def check(self, tokens: Int32Array, not_reached: int) -> tuple[IntArray, Int32Array]:
        """Verify the drafts, given the sampled tokens `[S]`.

        A failure code instead of a token ends the row, because the next step detects the failure at its base token.

        Returns:
            the number of counted tokens in each row, `[Q]`, which are those up to the first rejected draft; and
            `tokens` with all others replaced by `not_reached`.
        """
        # Most steps have few tokens. For these, a loop takes a third of the time of array operations.
        accepts = ((tokens[:-1] == self.expected[:-1]) & (tokens[1:] >= 0)).tolist()
        accepts.append(False)
        checked = tokens.copy()
        firsts = self.firsts.tolist()
        counts = []
        for first, end in zip(firsts, [*firsts[1:], len(tokens)], strict=True):
            at = first
            while accepts[at]:
                at += 1
            checked[at + 1 : end] = not_reached
            counts.append(at + 1 - first)
        return np.array(counts), checked


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Model and sampler inputs for one step: T tokens in R rows."""

    input_ids: torch.Tensor
    """`[T] int64`."""
    positions: torch.Tensor
    """`[T] int64`."""
    attention: AttentionInputs
    logits_index: torch.Tensor | None
    """`[S + P] int64`: last tokens of sampling rows, then tokens before those of `prompt_parts`; None for all tokens.
    """
    sample_rows: IntArray
    """`[S]`: each sampled token's row, ascending; a row with drafts occurs several times."""
    sample_rows_on_device: torch.Tensor
    """`[S] int64`: `sample_rows` on the device."""
    sample_positions: torch.Tensor
    """`[S] int32`: absolute position of each sampled token."""
    positions_on_host: IntArray
    """`[S]`: `sample_positions` on the host."""
    prompt_parts: tuple[PromptPart, ...] = ()
    """Prompt tokens that need log-probabilities, P in total."""
    prompt_targets: torch.Tensor | None = None
    """`[P] int64`: the tokens of `prompt_parts`; None without any."""
    pooled_parts: tuple[PooledPart, ...] = ()
    """The step's contributions to embeddings, with H tokens in total."""
    hidden_index: torch.Tensor | None = None
    """`[H] int64`: indices of the tokens in `pooled_parts` within the batch; None if there are none."""
    rows: IntArray
    """All rows of the step, in batch order."""
    num_tokens: int
    num_prefill_tokens: int
    verification: Verification | None = None
    """None: no row has drafts."""
    bucket: int = 0
    """Bucket of a decode step's graph, which also computes the tensors above; 0 for no decode graph."""


class BatchBuilder:
    """Builder of batches, which also advances the row table."""

    def __init__(
        self,
        table: RowTable,
        device: torch.device,
        lanes: DecodeLanes | None = None,
        groups: KVGroups | None = None,
    ) -> None:
        """Create a builder.

        Args:
            table: the rows.
            device: device of the batches.
            lanes: lanes of captured graphs, if any.
            groups: the KV groups; None if there is one.
        """
        self._groups = groups
        self._table_numbers = () if groups is None else groups.table_numbers
        self._table = table
        self._device = device
        self._lanes = lanes
        self._block_size = table.limits.block_size
        # Reuse tensors that depend only on the set of decode rows until that set changes.
        self._membership = -1
        self._rows_on_device = torch.zeros(0, dtype=torch.int64, device=device)
        self._query_start = torch.zeros(1, dtype=torch.int32, device=device)

    def build(
        self,
        chunk_rows: IntArray,
        chunk_lengths: IntArray,
        drafts: Drafts | None = None,
        saves: tuple[StateSave, ...] = (),
    ) -> StepBatch | None:
        """Build the batch of all decode rows and the given chunks; return None if there is nothing to compute.

        The row table then counts the tokens of the batch as computed, except the drafts.

        Raises:
            PlanError: a chunk does not fit its row, a row lacks blocks, or the step has too many tokens.
        """
        table = self._table
        if len(chunk_rows):
            table.check_chunks(chunk_rows, chunk_lengths)
        decode_rows = table.decode_rows()
        num_tokens = len(decode_rows) + (int(chunk_lengths.sum()) if len(chunk_rows) else 0)
        num_tokens += 0 if drafts is None else len(drafts.tokens)
        if num_tokens > table.limits.max_tokens_per_step:
            raise PlanError(f"step: {num_tokens} tokens exceed max_tokens_per_step {table.limits.max_tokens_per_step}")
        if num_tokens == 0:
            table.publish()
            return None
        bucket = None
        if self._lanes is not None:
            alone = len(chunk_rows) == 0 and drafts is None
            bucket = self._lanes.bucket(len(decode_rows)) if alone else None
            if bucket is None:
                self._lanes.fall_behind()
            else:
                return self._captured(self._lanes, decode_rows, bucket)
        table.publish()
        if len(chunk_rows):
            return self._mixed(decode_rows, chunk_rows, chunk_lengths, drafts or NO_DRAFTS, saves)
        return self._decode_only(decode_rows) if drafts is None else self._verifying(decode_rows, drafts)

    def _captured(self, lanes: DecodeLanes, rows: IntArray, bucket: int) -> StepBatch:
        table = self._table
        computed = table.num_computed[rows]
        table.check_room(rows, computed + 1)
        lanes.follow(rows, computed, bucket)
        table.publish()
        table.advance(NO_ROWS, NO_ROWS)
        inputs = lanes.inputs.lanes(len(rows))
        return StepBatch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attention=lanes.attention(len(rows)),
            logits_index=None,
            sample_rows=rows,
            sample_rows_on_device=inputs.rows,
            sample_positions=inputs.context_lens,
            positions_on_host=computed + 1,
            rows=rows,
            num_tokens=len(rows),
            num_prefill_tokens=0,
            bucket=bucket,
        )

    def _decode_only(self, rows: IntArray) -> StepBatch:
        table = self._table
        if self._membership != table.membership:
            self._remember_decode_rows(rows)
        positions = table.num_computed[rows]
        ends = positions + 1
        table.check_room(rows, ends)
        packed = np.empty((2, len(rows)), np.int64)
        packed[0], packed[1] = positions, self._slots(rows, positions)
        table.advance(NO_ROWS, NO_ROWS)
        positions_on_device, slots = upload(packed, self._device).unbind()
        context_lens = upload(ends.astype(np.int32), self._device)
        return StepBatch(
            input_ids=table.last_token.index_select(0, self._rows_on_device),
            positions=positions_on_device,
            attention=AttentionInputs(
                slot_mapping=slots,
                block_tables=self._block_tables(self._rows_on_device, int(ends.max())),
                query_start=self._query_start,
                context_lens=context_lens,
                max_query_len=1,
                rows=rows,
                table_numbers=self._table_numbers,
                windowed=self._windowed(rows, positions, self._rows_on_device, int(ends.max())),
            ),
            logits_index=None,
            sample_rows=rows,
            sample_rows_on_device=self._rows_on_device,
            sample_positions=context_lens,
            positions_on_host=ends,
            rows=rows,
            num_tokens=len(rows),
            num_prefill_tokens=0,
        )

    def _verifying(self, decode_rows: IntArray, drafts: Drafts) -> StepBatch:
        """Build the batch for a step without chunks in which rows have drafts; all of its tokens sample."""
        table = self._table
        singles = self._without_drafts(decode_rows, drafts)
        num_singles = len(singles)
        rows = np.concatenate((singles, drafts.rows)) if num_singles else drafts.rows
        lengths = np.ones(len(rows), np.int64)
        lengths[num_singles:] += drafts.counts
        starts = table.num_computed[rows]
        ends = starts + lengths
        table.check_room(rows, ends)
        query_start = np.zeros(len(rows) + 1, np.int64)
        lengths.cumsum(out=query_start[1:])
        num_tokens = int(query_start[-1])
        token_rows, positions = np.repeat(rows, lengths), np.repeat(starts - query_start[:-1], lengths)
        positions += np.arange(num_tokens)
        slots = self._slots(token_rows, positions)
        windowed = partial(self._windowed, token_rows, positions)
        known_ids = self._with_base_tokens(drafts)
        table.advance(NO_ROWS, NO_ROWS)
        logits_index_, sample_rows, sample_positions_, sampled = NO_ROWS, token_rows, positions + 1, lengths
        if num_singles:
            order = np.argsort(rows)
            sampled = lengths[order]
            logits_index_ = np.repeat(query_start[order + 1] - sampled.cumsum(), sampled) + np.arange(num_tokens)
            sample_rows, sample_positions_ = token_rows[logits_index_], sample_positions_[logits_index_]
        positions_, slots_, known_ids_, rows_, sample_rows_, logits_index = self._upload(
            (positions, slots, known_ids, rows, sample_rows, logits_index_), np.int64
        )
        query_start_, context_lens, sample_positions = self._upload((query_start, ends, sample_positions_), np.int32)
        return StepBatch(
            input_ids=torch.cat((table.last_token.index_select(0, rows_[:num_singles]), known_ids_))
            if num_singles
            else known_ids_,
            positions=positions_,
            attention=self._attention(
                *(rows, slots_, rows_, query_start_, context_lens, lengths, ends, num_singles),
                drafting=tuple(drafts.rows.tolist()),
                windowed=windowed,
            ),
            logits_index=logits_index if num_singles else None,
            sample_rows=sample_rows,
            sample_rows_on_device=sample_rows_,
            sample_positions=sample_positions,
            positions_on_host=sample_positions_,
            rows=rows,
            num_tokens=num_tokens,
            num_prefill_tokens=0,
            verification=_verification(drafts, sampled),
        )

    def _mixed(
        self,
        decode_rows: IntArray,
        chunk_rows: IntArray,
        chunk_lengths: IntArray,
        drafts: Drafts,
        saves: tuple[StateSave, ...],
    ) -> StepBatch:
        table = self._table
        decode_rows = self._without_drafts(decode_rows, drafts)
        num_singles = len(decode_rows)
        rows = np.concatenate((decode_rows, drafts.rows, chunk_rows))
        lengths = np.concatenate((np.ones_like(decode_rows), drafts.counts + 1, chunk_lengths))
        starts = table.num_computed[rows]
        ends = starts + lengths
        table.check_room(rows, ends)
        query_start = np.concatenate(([0], np.cumsum(lengths)))
        num_tokens = int(query_start[-1])
        positions = np.repeat(starts - query_start[:-1], lengths) + np.arange(num_tokens)
        token_rows = np.repeat(rows, lengths)
        slots = self._slots(token_rows, positions)
        known_ids = np.concatenate(
            [
                self._with_base_tokens(drafts),
                *(
                    table.chunk_tokens(row, length)
                    for row, length in zip(chunk_rows.tolist(), chunk_lengths.tolist(), strict=True)
                ),
            ]
        )
        num_decodes = num_singles + len(drafts.rows)
        num_prefill_tokens = int(chunk_lengths.sum())
        parts, predicting, targets = self._prompt_parts(num_tokens - num_prefill_tokens, chunk_rows, chunk_lengths)
        finished = table.advance(chunk_rows, chunk_lengths)
        pooled = table.pooling.parts(
            chunk_rows.tolist(),
            table.generation[chunk_rows].tolist(),
            query_start[num_decodes:-1].tolist(),
            chunk_lengths.tolist(),
            ends[num_decodes:].tolist(),
            finished.tolist(),
        )
        hidden_index_ = [np.arange(part.first, part.first + part.num_tokens) for part in pooled]

        # The last tokens of each row that samples.
        generating = finished & ~table.pooling.pools(chunk_rows)
        sampled = np.concatenate((lengths[:num_decodes], generating.astype(np.int64)))
        order = np.argsort(rows)
        counts = sampled[order]
        places = np.repeat(query_start[order + 1] - np.cumsum(counts), counts) + np.arange(int(counts.sum()))
        sample_rows, ends_sampled = np.repeat(rows[order], counts), positions[places] + 1
        logits_index_ = np.concatenate((places, predicting))
        wide = (
            positions, slots, known_ids, rows, logits_index_, sample_rows, targets,
            np.concatenate(hidden_index_) if pooled else NO_ROWS,
        )  # fmt: skip
        narrow = (query_start, ends, ends_sampled)
        positions_, slots_, known_ids_, rows_, logits_index, sample_rows_, targets_, hidden_index = self._upload(
            wide, np.int64
        )
        query_start_, context_lens, sample_positions = self._upload(narrow, np.int32)
        return StepBatch(
            input_ids=torch.cat((table.last_token.index_select(0, rows_[:num_singles]), known_ids_)),
            positions=positions_,
            attention=self._attention(
                rows,
                slots_,
                rows_,
                query_start_,
                context_lens,
                lengths,
                ends,
                num_singles,
                saves,
                drafting=tuple(drafts.rows.tolist()),
                windowed=partial(self._windowed, token_rows, positions),
            ),
            logits_index=logits_index,
            sample_rows=sample_rows,
            sample_rows_on_device=sample_rows_,
            sample_positions=sample_positions,
            positions_on_host=ends_sampled,
            prompt_parts=parts,
            prompt_targets=targets_ if parts else None,
            pooled_parts=pooled,
            hidden_index=hidden_index if pooled else None,
            rows=rows,
            num_tokens=num_tokens,
            num_prefill_tokens=num_prefill_tokens,
            verification=None if not len(drafts.rows) else _verification(drafts, counts[counts > 0]),
        )

    def _attention(
        self,
        rows: IntArray,
        slots: torch.Tensor,
        rows_on_device: torch.Tensor,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        lengths: IntArray,
        ends: IntArray,
        num_singles: int,
        saves: tuple[StateSave, ...] = (),
        *,
        drafting: tuple[int, ...] = (),
        windowed: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor] | None],
    ) -> AttentionInputs:
        """Return the inputs for rows with `lengths[i]` tokens up to position `ends[i]`; one-token rows come first."""
        return AttentionInputs(
            slot_mapping=slots,
            block_tables=self._block_tables(rows_on_device, int(ends.max())),
            query_start=query_start,
            context_lens=context_lens,
            max_query_len=int(lengths.max()),
            min_query_len=int(lengths.min()),
            num_leading_decodes=num_singles,
            rows=rows,
            saves=saves,
            drafting=drafting,
            table_numbers=self._table_numbers,
            windowed=windowed(rows_on_device, int(ends.max())),
        )

    def _without_drafts(self, decode_rows: IntArray, drafts: Drafts) -> IntArray:
        """Return the decode rows that have no drafts, ascending."""
        if not len(drafts.rows):
            return decode_rows
        if len(drafts.rows) == len(decode_rows):
            return NO_ROWS
        single = np.ones(self._table.limits.max_rows, np.bool_)
        single[drafts.rows] = False
        return decode_rows[single[decode_rows]]

    def _with_base_tokens(self, drafts: Drafts) -> Int32Array:
        """Return the input tokens of the rows with drafts."""
        lengths = drafts.counts + 1
        tokens = np.empty(len(drafts.tokens) + len(lengths), np.int32)
        is_draft = np.ones(len(tokens), np.bool_)
        places = lengths.cumsum() - lengths
        is_draft[places] = False
        tokens[places] = self._table.last_known[drafts.rows]
        tokens[is_draft] = drafts.tokens
        return tokens

    def _prompt_parts(
        self, place: int, chunk_rows: IntArray, chunk_lengths: IntArray
    ) -> tuple[tuple[PromptPart, ...], IntArray, IntArray]:
        """Return the chunks' prompt tokens that need log-probabilities; call this before `RowTable.advance`.

        The first chunk begins at `place` in the batch.

        Returns:
            The parts, the places in the batch of the tokens that predict them, and the prompt tokens.
        """
        table = self._table
        counts = table.sampling.prompt_logprobs[chunk_rows]
        if (counts < 0).all():
            return (), NO_ROWS, NO_ROWS
        parts, places, targets = [], [], []
        for row, length, count in zip(chunk_rows.tolist(), chunk_lengths.tolist(), counts.tolist(), strict=True):
            start = int(table.num_computed[row])
            num_tokens = min(start + length, int(table.num_prompt[row]) - 1) - start
            if count >= 0 and num_tokens > 0:
                generation = int(table.generation[row])
                parts.append(PromptPart(row, generation, count, start + 1, num_tokens))
                places.append(np.arange(place, place + num_tokens))
                targets.append(table.chunk_tokens(row, num_tokens + 1)[1:].astype(np.int64))
            place += length
        if not parts:
            return (), NO_ROWS, NO_ROWS
        return tuple(parts), np.concatenate(places), np.concatenate(targets)

    def _remember_decode_rows(self, rows: IntArray) -> None:
        self._membership = self._table.membership
        self._rows_on_device = upload(rows.copy(), self._device)
        self._query_start = upload(np.arange(len(rows) + 1, dtype=np.int32), self._device)

    def _slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        index, offset = np.divmod(positions, self._block_size)
        return self._table.tables.blocks_at(rows, index) * self._block_size + offset

    def _block_tables(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        """Return the rows' block tables `[R, blocks of the longest row] int32` in the first group."""
        num_blocks = -(-longest // self._block_size)
        return self._table.tables.device_tables[:, :num_blocks].index_select(0, rows)

    def _windowed(
        self, token_rows: IntArray, positions: IntArray, rows: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `AttentionInputs.windowed` for tokens at these positions of their rows."""
        if self._groups is None:
            return None
        tables = self._table.tables
        index, offset = np.divmod(positions, self._block_size)
        slots = window_slots(self._groups, tables.window_blocks_at(token_rows, index), offset, self._block_size)
        num_blocks = -(-longest // self._block_size)
        of_rows = tables.device_window_tables[:, :, :num_blocks].index_select(1, rows)
        return upload(slots, self._device), window_tables(self._groups, of_rows)

    def _upload(self, arrays: tuple[IntArray | Int32Array, ...], dtype: npt.DTypeLike) -> tuple[torch.Tensor, ...]:
        """Upload the arrays with one copy."""
        packed = upload(np.concatenate(arrays).astype(dtype, copy=False), self._device)
        return torch.split(packed, [len(array) for array in arrays])


def _verification(drafts: Drafts, sampled: IntArray) -> Verification:
    """Return how the drafts are verified. The i-th sampling row samples `sampled[i]` tokens; rows ascending."""
    ends = sampled.cumsum()
    firsts = ends - sampled
    # In a row with drafts, all sampled tokens but the last are compared with a draft.
    compared = np.repeat(sampled > 1, sampled)
    compared[ends - 1] = False
    expected = np.full(len(compared), -1)
    expected[compared] = drafts.tokens
    return Verification(firsts=firsts, num_drafts=sampled - 1, expected=expected)
