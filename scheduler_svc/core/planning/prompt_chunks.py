"""Prompt chunks in one step: which prompts are computed, and how many tokens of each.

The prompt tokens of a step are shared in two parts:

* The *short part* goes to the started or waiting prompts with the fewest tokens left (shortest remaining processing
  time). So a short prompt starts with the next plan even if long prompts are in progress.
* The rest, including the unused short part, goes in policy order.

The short part is half of the tokens. It is three quarters once the first started prompt in policy order has missed its
target for the first token, because haste gains nothing for that prompt, while shorter ones may still be in time. A
prompt thus gets its first token after at most k times the time for itself and all prompts before it, regardless of the
short
prompts that arrive: k is 2 as long as the first prompts can be in time, and 4 after that.

Under `fcfs` there is no short part: all prompt tokens go in order of arrival.
"""

from scheduler_svc.core.workers.chunks import chunk_cost, longest_chunk
from scheduler_svc.core.workers.worker import Worker
from shared.frames import MAX_STEP_VECTOR_BYTES
from shared.request_spec import Pooling

_QUARTERS, _QUARTERS_IF_LATE = 2, 3
"""Quarters of a step's prompt tokens for the shortest prompts."""
_FLOAT_BYTES = 4
"""Bytes of one element of an embedding."""


def short_part(budget: int, step: int, *, first_is_late: bool) -> int:
    """Return the budget tokens of the short part.

    The remainder of the division goes to one part or the other, depending on the step, so both parts advance even if
    each step has one token.

    Args:
        budget: budget tokens of the step's chunks.
        step: number of the step.
        first_is_late: whether the first started prompt has missed its target.
    """
    return ((_QUARTERS_IF_LATE if first_is_late else _QUARTERS) * budget + step % 4) // 4


class StepChunks:
    """The chunks in one worker's step, within a budget."""

    def __init__(self, worker: Worker, budget: int, longest: int) -> None:
        """Start without chunks.

        Args:
            worker: the worker.
            budget: budget tokens of the step, for all purposes.
            longest: most tokens of one prompt in the step.
        """
        self._worker = worker
        self._longest = longest if worker.windows is None else min(longest, worker.windows.max_step)
        self._break_even = worker.model.break_even_context
        self._at: dict[int, int] = {}
        """By row, the position of its chunk."""
        self._charged: list[int] = []
        """Budget tokens charged for each chunk."""
        self._pooled: set[int] = set()
        """Rows whose embedding this step completes, or that wait for room in its result."""
        self.budget = budget
        """Budget tokens that are left."""
        self.rows: list[int] = []
        self.lengths: list[int] = []
        self.cost = 0
        """Budget tokens that the chunks take."""

    def __bool__(self) -> bool:
        """Return whether the step has a chunk."""
        return bool(self.rows)

    def limit(self, budget: int) -> None:
        """Lower the remaining budget to `budget`."""
        self.budget = min(self.budget, budget)

    def add(self, row: int, most: int | None = None) -> int:
        """Compute more of a row's prompt in this step; return the used budget tokens.

        Args:
            row: a row in prefill.
            most: maximum budget tokens to use; None for all that remain.
        """
        budget = self.budget if most is None else min(most, self.budget)
        if budget <= 0:
            return 0
        rows = self._worker.rows
        at = self._at.get(row)
        # The cost of extending a chunk is the longer chunk's cost minus the shorter chunk's.
        chunk, charged = (0, 0) if at is None else (self.lengths[at], self._charged[at])
        computed = rows.computed.item(row)
        rest = rows.length.item(row) - computed - chunk
        if not rest and not self._break_even:
            return 0  # The budget always suffices for nothing.
        affordable = longest_chunk(budget + charged, computed, self._break_even) - chunk
        if at is None and budget == self.budget:
            affordable = max(1, affordable)
        added = min(rest, affordable, self._longest - chunk)
        if added == rest and added > 0 and not self._has_room_for_result(row):
            added -= 1  # Compute the last token in a later step, because that step's result has room for the embedding.
        if added <= 0:
            if most is None and affordable <= 0:
                # The remaining budget is too small for another token. Do not leave it to later prompts.
                self.budget = 0
            return 0
        # If the budget limits the chunk, the remainder is too small for another token of this prompt. Charge the
        # remainder too.
        ends_budget = budget == self.budget and added == affordable
        cost = budget if ends_budget else chunk_cost(chunk + added, computed, self._break_even) - charged
        if at is None:
            self._at[row] = len(self.rows)
            self.rows.append(row)
            self.lengths.append(added)
            self._charged.append(cost)
        else:
            self.lengths[at] += added
            self._charged[at] += cost
        self.cost += cost
        self.budget -= cost
        self._worker.publisher.publish_blocks(row, computed + chunk + added)
        return cost

    def rest(self, row: int) -> int:
        """Return the tokens of a row's prompt that neither an earlier step nor this one computes."""
        rows, at = self._worker.rows, self._at.get(row)
        return rows.length.item(row) - rows.computed.item(row) - (0 if at is None else self.lengths[at])

    def _has_room_for_result(self, row: int) -> bool:
        """Reserve space in the step's result for a pooling row's embedding; return False if the result is full."""
        request = self._worker.rows.requests[row]
        assert request is not None
        if request.spec.pooling == Pooling.NONE:
            return True
        self._pooled.add(row)
        return len(self._pooled) * _FLOAT_BYTES * self._worker.model.hidden_size <= MAX_STEP_VECTOR_BYTES
