"""The drafts of one step: which rows have some, how many, and which tokens.

A row has at most as many drafts as its draft limit, the room in its blocks, `max_model_len` and the tokens left to the
step allow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from worker_svc.interface.arrays import NO_IDS, NO_ROWS, Int32Array, IntArray
from worker_svc.interface.plan import Plan
from worker_svc.ranks.group import Group
from worker_svc.rows.table import RowTable


class Proposer(Protocol):
    """Source of drafts."""

    def propose(self, rows: IntArray, most: IntArray) -> Sequence[Sequence[int]]:
        """Return at most `most[i]` draft tokens for each row `rows[i]`; it may be none."""
        ...

    def prefill(self, rows: IntArray, lengths: IntArray) -> None:
        """Note the chunks of the step: the last `lengths[i]` tokens that `rows[i]` now counts as computed."""
        ...

    def follow(self, plan: Plan) -> None:
        """Note the changes of a plan, before the rows change: rows leave, blocks get other content."""
        ...

    def clear(self) -> None:
        """Forget all rows, for a new epoch."""
        ...


class GroupProposer:
    """Proposer of several ranks: rank 0 proposes, and sends its drafts to the others."""

    def __init__(self, group: Group, proposer: Proposer | None) -> None:
        """Create a proposer; `proposer` is that of rank 0, None on the other ranks."""
        self._group = group
        self._proposer = proposer

    def propose(self, rows: IntArray, most: IntArray) -> Sequence[Sequence[int]]:
        """See `Proposer.propose`. All ranks call this at the same point of a step, with the same arguments."""
        sent = np.zeros((len(rows), 1 + int(most.max())), np.int32)
        if self._proposer is not None:
            for place, drafts in enumerate(self._proposer.propose(rows, most)):
                sent[place, : 1 + len(drafts)] = (len(drafts), *drafts)
        self._group.broadcast(torch.from_numpy(sent))
        return [each[1 : 1 + each[0]] for each in sent.tolist()]

    def prefill(self, rows: IntArray, lengths: IntArray) -> None:
        if self._proposer is not None:
            self._proposer.prefill(rows, lengths)

    def follow(self, plan: Plan) -> None:
        if self._proposer is not None:
            self._proposer.follow(plan)

    def clear(self) -> None:
        if self._proposer is not None:
            self._proposer.clear()


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of one step."""

    rows: IntArray
    """`[D]`: the rows with drafts, ascending."""
    counts: IntArray
    """`[D]`: drafts of each row, at least one."""
    tokens: Int32Array
    """`[sum of counts]`: the draft tokens, grouped by row."""


NO_DRAFTS = Drafts(NO_ROWS, NO_ROWS, NO_IDS)


_NO_LATE: Mapping[int, Sequence[int]] = {}
_NO_ENDS: Mapping[int, int] = {}


def propose(
    table: RowTable,
    proposer: Proposer,
    num_chunk_tokens: int,
    late: Mapping[int, Sequence[int]] = _NO_LATE,
    ends: Mapping[int, int] = _NO_ENDS,
) -> Drafts | None:
    """Return the drafts of the next step of the decode rows; None if there are none.

    Args:
        table: the rows, with the changes of the step's plan applied.
        proposer: the source of drafts.
        num_chunk_tokens: tokens of the step's chunks.
        late: rows that have no drafts in this step, because their recurrent state is behind, with the tokens that the
            step computes again.
        ends: by row, the number of tokens that its drafts must not exceed, because its state is saved there.
    """
    decode_rows = table.decode_rows()
    rows, most = table.draft_room(decode_rows)
    if late:
        on_time = ~np.isin(rows, list(late))
        rows, most = rows[on_time], most[on_time]
    if ends:
        longest = np.array([ends.get(row, table.limits.max_model_len) for row in rows.tolist()], np.int64)
        most = np.minimum(most, longest - table.num_computed[rows] - 1)
        rows, most = rows[most > 0], most[most > 0]
    left = table.limits.max_tokens_per_step - num_chunk_tokens - len(decode_rows) - sum(map(len, late.values()))
    if not len(rows) or left <= 0:
        return None
    found_rows, counts, tokens = [], [], list[int]()
    for row, proposed in zip(rows.tolist(), proposer.propose(rows, np.minimum(most, left)), strict=True):
        kept = proposed[: left - len(tokens)]
        if len(kept):
            found_rows.append(row)
            counts.append(len(kept))
            tokens.extend(kept)
    if not found_rows:
        return None
    return Drafts(np.array(found_rows), np.array(counts), np.array(tokens, np.int32))
