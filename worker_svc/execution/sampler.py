"""Sampler: turns the logits of a step into tokens.

A step takes log-probabilities from the model's own logits first. Then rules change the logits of the rows that have
rules (`outputs.logits`), and grammars mask the logits of their rows (`outputs.grammars`). Last, all rows sample
together. The sampling parameters of a batch are kept on the device until its rows change.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.sampling import SamplingTensors, greedy, nonfinite_rows, sample_checked
from worker_svc.device.accelerator import Accelerator
from worker_svc.device.upload import upload
from worker_svc.execution.batch import StepBatch
from worker_svc.execution.executor import Sampled
from worker_svc.execution.host_tokens import HostTokens
from worker_svc.outputs.logits import LogitsBatch
from worker_svc.outputs.scores import Wanted, score
from worker_svc.rows.table import RowTable

NOT_FINITE = -1
"""Code instead of a token: the model's logits are not finite."""
NOTHING_ALLOWED = -2
"""Code instead of a token: the row's rules and grammar allow no token."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Sampling parameters of a batch, valid until its rows change."""

    params: SamplingTensors
    rules: LogitsBatch | None
    grammar_rows: tuple[int, ...]
    """Rows with a grammar."""
    grammar_index: torch.Tensor
    """`[G] int64`: the places of `grammar_rows` in the batch."""
    grammar_lines: torch.Tensor
    """`[G] int64`: `grammar_rows` on the device."""
    restricted: torch.Tensor | None
    """`[R] int64`: the places of rows with rules or a grammar, which may allow no token; None: no such row."""
    wanted: Wanted | None
    needs_host_tokens: bool
    """Whether a row needs its last token on the host."""


class Sampler:
    """Sampler of one token per sampling row of a batch."""

    def __init__(self, table: RowTable, device: torch.device, accelerator: Accelerator | None = None) -> None:
        """Create a sampler for the rows of `table`; `accelerator` is that of `device`, None on a CPU."""
        self._table = table
        self._device = device
        self._accelerator = accelerator
        self._gathered_for: tuple[int, bytes] = (-1, b"")
        self._gathered: _Gathered | None = None
        self._pending: HostTokens | None = None
        """Tokens of the last step, if one of its rows needs them on the host."""

    def wanted(self, batch: StepBatch) -> Wanted | None:
        """Return the rows of a batch that need log-probabilities of their sampled tokens."""
        return self._gather_once(batch).wanted

    def clear(self) -> None:
        """Forget the last step, for a new epoch."""
        self._pending = None

    def sample(self, logits: torch.Tensor, batch: StepBatch) -> Sampled:
        """Sample tokens from logits `[S + P, vocab_size]` and write them to the rows' `last_token`.

        A row that cannot sample gets the code `NOT_FINITE` or `NOTHING_ALLOWED` instead of a token.
        """
        gathered = self._gather_once(batch)
        self._note_last_tokens()
        params, rules, wanted = gathered.params, gathered.rules, gathered.wanted
        if params.any_random:
            params = replace(params, position=batch.sample_positions)
        num_rows = len(batch.sample_rows)
        own, of_prompts = logits[:num_rows], logits[num_rows:]
        restricted = gathered.restricted
        if restricted is None and wanted is None and batch.prompt_targets is None and not params.any_random:
            return Sampled(self._sample_greedily(own, batch))
        failed = None if restricted is None else nonfinite_rows(own)
        raw = None if wanted is None else own[wanted.index]
        if restricted is not None:
            own = self._restrict(own, gathered, batch)
        checked = sample_checked(own, params)
        tokens = checked.clamp(min=0)
        self._table.last_token.index_copy_(0, batch.sample_rows_on_device, tokens)
        if rules is not None:
            self._table.rules.count_sampled(rules, tokens)
        outcome = checked.to(torch.int32)  # contains NOT_FINITE codes
        if failed is not None:
            outcome = outcome.masked_fill(outcome < 0, NOTHING_ALLOWED).masked_fill(failed, NOT_FINITE)
        if gathered.needs_host_tokens:
            generations = self._table.generation[batch.sample_rows]
            self._pending = HostTokens(outcome, batch.sample_rows, generations, self._accelerator)
        return Sampled(outcome, self._scores(raw, wanted, tokens, of_prompts, batch))

    def _sample_greedily(self, logits: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Sample a batch of greedy rows without rules, grammars or log-probabilities, in one pass over the logits."""
        outcome = greedy(logits)
        self._table.last_token.index_copy_(0, batch.sample_rows_on_device, outcome.clamp(min=0))
        return outcome.to(torch.int32)

    def _restrict(self, logits: torch.Tensor, gathered: _Gathered, batch: StepBatch) -> torch.Tensor:
        """Return the logits after rules and grammars, in float32 if there are rules; may change `logits`."""
        rules = gathered.rules
        if rules is not None:
            changed = self._table.rules.apply(logits, rules, batch.positions_on_host)
            logits = logits.to(torch.float32)
            logits[rules.index] = changed
        if gathered.grammar_rows:
            self._table.grammars.mask(logits, gathered.grammar_rows, gathered.grammar_lines, gathered.grammar_index)
        return logits

    def _scores(
        self,
        raw: torch.Tensor | None,
        wanted: Wanted | None,
        tokens: torch.Tensor,
        of_prompts: torch.Tensor,
        batch: StepBatch,
    ) -> torch.Tensor | None:
        """Return the packed log-probabilities that rows need: of sampled tokens, then of prompt tokens."""
        counts = [part.count for part in batch.prompt_parts]
        most = max((*counts, *(wanted.counts if wanted is not None else ())), default=0)
        found = []
        if raw is not None and wanted is not None:
            found.append(score(raw, tokens[wanted.index], most).packed())
        if batch.prompt_targets is not None:
            found.append(score(of_prompts, batch.prompt_targets, most).packed())
        return torch.cat(found) if found else None

    def _note_last_tokens(self) -> None:
        """Pass the tokens of the last step to the rules and grammars that need them on the host."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        table = self._table
        for row, generation, token in pending.wait():
            if token >= 0 and table.generation[row] == generation and table.needs_host_tokens(row):
                table.note_token(row, token)

    def _gather_once(self, batch: StepBatch) -> _Gathered:
        """Return the parameters of the batch's rows; gather them again only if `membership` or the rows changed."""
        key = (self._table.membership, batch.sample_rows.tobytes())
        if self._gathered is None or self._gathered_for != key:
            self._gathered, self._gathered_for = self._gather(batch), key
        return self._gathered

    def _gather(self, batch: StepBatch) -> _Gathered:
        columns, rows = self._table.sampling, batch.sample_rows
        random = columns.temperature[rows] > 0
        truncated = (columns.top_k[rows] > 0) | (columns.top_p[rows] < 1) | (columns.min_p[rows] > 0)
        typical = random & (columns.typical_p[rows] < 1)
        floats = upload(
            np.concatenate((columns.temperature[rows], columns.top_p[rows], columns.min_p[rows])),
            self._device,
        )
        ints = upload(np.concatenate((columns.top_k[rows], columns.choice[rows])), self._device)
        temperature, top_p, min_p = floats.chunk(3)
        top_k, choice = ints.chunk(2)
        rules = self._table.rules.batch(rows)
        grammars = self._table.grammars
        grammar_places = [place for place, row in enumerate(rows.tolist()) if row in grammars] if len(grammars) else []
        grammar_rows = rows[grammar_places]
        grammar_columns = np.stack((np.array(grammar_places, np.int64), grammar_rows)).astype(np.int64)
        grammar_index, grammar_lines = upload(grammar_columns, self._device)
        restricted = torch.cat([grammar_index] if rules is None else [rules.index, grammar_index])
        return _Gathered(
            SamplingTensors(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=upload(columns.seed[rows], self._device),
                choice=choice,
                position=batch.sample_positions,
                any_random=bool(random.any()),
                any_truncation=bool((random & truncated).any()),
                typical_p=upload(columns.typical_p[rows], self._device) if typical.any() else None,
            ),
            rules,
            tuple(grammar_rows.tolist()),
            grammar_index,
            grammar_lines,
            restricted if len(restricted) else None,
            self._wanted(batch),
            restricted.numel() > 0 and any(map(self._table.needs_host_tokens, rows.tolist())),
        )

    def _wanted(self, batch: StepBatch) -> Wanted | None:
        rows = batch.sample_rows
        counts = self._table.sampling.logprobs[rows]
        places = np.flatnonzero(counts >= 0)
        if not len(places):
            return None
        return Wanted(
            index=upload(places, self._device),
            rows=tuple(rows[places].tolist()),
            generations=tuple(self._table.generation[rows[places]].tolist()),
            counts=tuple(counts[places].tolist()),
        )
