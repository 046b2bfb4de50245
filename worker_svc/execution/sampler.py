"""Sampler: turns the logits of a step into tokens.

First, log-probabilities are computed from the model's unmodified logits. Then rules change the logits of rows with
rules (`outputs.logits`), and grammars mask the logits of rows with a grammar (`outputs.grammars`). Finally, all rows
are sampled together. A batch's sampling parameters stay on the device until its rows change.

A row with drafts is sampled at its base token and at each draft. A draft is accepted if it equals the token sampled at
the previous position. Only the tokens up to the first rejected draft count (`Verification.counts`). Because the noise
depends only on positions, these are the same tokens as without drafts. Rows without restrictions are sampled at all
positions together. With rules or a grammar, each token must be known before the next one is sampled, so such rows are
sampled one position after the other.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.sampling import SamplingTensors, greedy, nonfinite_rows, sample_checked
from worker_svc.device.accelerator import Accelerator
from worker_svc.device.upload import upload
from worker_svc.execution.batch import StepBatch, Verification
from worker_svc.execution.executor import Sampled
from worker_svc.execution.host_tokens import HostTokens
from worker_svc.execution.split_logits import SplitLogits
from worker_svc.interface.arrays import IntArray
from worker_svc.outputs.logits import LogitsBatch
from worker_svc.outputs.scores import Wanted, score
from worker_svc.rows.table import RowTable

NOT_FINITE = -1
"""Code instead of a token: the model's logits are not finite."""
NOTHING_ALLOWED = -2
"""Code instead of a token: the row's rules and grammar allow no token."""
NOT_REACHED = -3
"""Code instead of a token: the token does not count, because an earlier draft was rejected."""
_MOST_GATHERED = 16
"""Maximum number of cached batches with the same rows, enough for one request with up to 15 drafts."""


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
    """`[R] int64`: indices of the rows whose rules or grammar could forbid every token; None if there are none."""
    needs_host_tokens: bool
    """Whether a row needs its last token on the host."""
    whole: torch.Tensor | None = None
    """`[n] int64`: indices of the rows that need the whole vocabulary's logits; None if this process has them."""
    single: torch.Tensor | None = None
    """`[m] int64`: indices of all other rows; None if `whole` is None."""


class Sampler:
    """Sampler of the tokens of a batch."""

    def __init__(
        self,
        table: RowTable,
        device: torch.device,
        accelerator: Accelerator | None = None,
        split: SplitLogits | None = None,
    ) -> None:
        """Create a sampler.

        Args:
            table: the rows.
            device: the device of the logits.
            accelerator: the accelerator for `device`; None on a CPU.
            split: the exchange of logits between ranks; None if the logits cover the whole vocabulary.
        """
        self._split = split
        self._table = table
        self._device = device
        self._accelerator = accelerator
        self._membership = -1
        self._gathered: dict[bytes, _Gathered] = {}
        """Parameters by the rows of a batch, valid while `membership` is unchanged. Steps with drafts repeat rows."""
        self._wanted: dict[bytes, Wanted | None] = {}
        self._pending: HostTokens | None = None
        """The last step's tokens, if one of its rows needs its token on the host."""

    def wanted(self, batch: StepBatch) -> Wanted | None:
        """Return the rows in a batch that need log-probabilities for their sampled tokens."""
        self._forget_former_rows()
        key = batch.sample_rows.tobytes()
        if key not in self._wanted:
            self._wanted[key] = self._find_wanted(batch)
        return self._wanted[key]

    def clear(self) -> None:
        """Drop the last step, for a new epoch."""
        self._pending = None

    def sample(self, logits: torch.Tensor, batch: StepBatch) -> Sampled:
        """Sample tokens from logits `[S + P, vocab_size]`. If no row has drafts, write them to the rows' `last_token`.

        With `split`, the logits cover this rank's part of the vocabulary. A row that cannot sample gets the code
        `NOT_FINITE` or `NOTHING_ALLOWED` instead of a token.
        """
        return self._sample(logits, batch) if self._split is None else self._sample_split(logits, batch, self._split)

    def _sample_split(self, logits: torch.Tensor, batch: StepBatch, split: SplitLogits) -> Sampled:
        """Sample as `_sample` does, together with the other ranks; only rank 0 has log-probabilities."""
        gathered = self._gather_once(batch)
        whole, single = gathered.whole, gathered.single
        assert whole is not None
        assert single is not None
        num_rows, num_prompt = len(batch.sample_rows), len(logits) - len(batch.sample_rows)
        params = replace(gathered.params, position=batch.sample_positions)
        if num_prompt:
            whole = torch.cat((whole, torch.arange(num_rows, len(logits), device=whole.device)))
        if len(whole):
            together = split.gather(logits, whole, single, params)
            sampled = None if together is None else self._sample(together, batch)
            tokens = split.share(None if sampled is None else sampled.tokens, num_rows, logits.device)
            if sampled is not None:
                return sampled
            outcome = tokens.to(torch.int64)
        else:
            outcome = split.sample(logits, params)
        if batch.verification is None:
            self._table.last_token.index_copy_(0, batch.sample_rows_on_device, outcome.clamp(min=0))
        return Sampled(outcome.to(torch.int32))

    def _sample(self, logits: torch.Tensor, batch: StepBatch) -> Sampled:
        self._note_last_tokens()
        num_rows, wanted = len(batch.sample_rows), self.wanted(batch)
        own, of_prompts = logits[:num_rows], logits[num_rows:]
        raw = None if wanted is None else own[wanted.index]
        if batch.verification is None:
            gathered = self._gather_once(batch)
            outcome = self._pick(own, gathered, batch.sample_positions, batch.positions_on_host)
            self._table.last_token.index_copy_(0, batch.sample_rows_on_device, outcome.clamp(min=0))
            if gathered.needs_host_tokens:
                generations = self._table.generation[batch.sample_rows]
                self._pending = HostTokens(outcome.to(torch.int32), batch.sample_rows, generations, self._accelerator)
        else:
            outcome = self._verify(own, batch, batch.verification)
        scores = None
        if raw is not None or batch.prompt_targets is not None:
            scores = self._scores(raw, wanted, outcome.clamp(min=0), of_prompts, batch)
        return Sampled(outcome.to(torch.int32), scores)

    def _pick(
        self, logits: torch.Tensor, gathered: _Gathered, positions: torch.Tensor, positions_on_host: IntArray
    ) -> torch.Tensor:
        """Sample one token from each line of logits `[S, vocab_size]`, which may change.

        Returns:
            Tokens or codes, `[S] int64`.
        """
        params, rules = gathered.params, gathered.rules
        if gathered.restricted is None:
            return sample_checked(logits, replace(params, position=positions)) if params.any_random else greedy(logits)
        failed = nonfinite_rows(logits)
        checked = sample_checked(
            self._restrict(logits, gathered, positions_on_host), replace(params, position=positions)
        )
        if rules is not None:
            self._table.rules.count_sampled(rules, checked.clamp(min=0))
        return checked.masked_fill(checked < 0, NOTHING_ALLOWED).masked_fill(failed, NOT_FINITE)

    def _verify(self, logits: torch.Tensor, batch: StepBatch, verification: Verification) -> torch.Tensor:
        """Sample at all places of a batch with drafts, from logits `[S, vocab_size]`.

        Returns: Tokens or codes, `[S] int64`; the values at unneeded positions are arbitrary.
        """
        rows, expected = batch.sample_rows, verification.expected
        restricted = self._table.restricted(rows)
        if not restricted.any():
            params = self._gather_once(batch).params
            return sample_checked(logits, replace(params, position=batch.sample_positions))
        outcome = torch.full((len(rows),), NOT_REACHED, dtype=torch.int64, device=self._device)
        first = np.zeros(len(rows), np.bool_)
        first[verification.firsts] = True
        places = np.flatnonzero(first | ~restricted)
        while True:
            self._pick_at(places, logits, batch, outcome)
            places = places[restricted[places]]
            if not len(places):
                break
            # The host waits here, because rules and grammars for the next position need these tokens.
            tokens = outcome[upload(places, self._device)].cpu().numpy()
            for row, token in zip(rows[places].tolist(), tokens.tolist(), strict=True):
                if token >= 0 and self._table.needs_host_tokens(row):
                    self._table.note_token(row, token)
            places = places[(tokens == expected[places]) & (tokens >= 0)] + 1
            if not len(places):
                break
        return outcome

    def _pick_at(self, places: IntArray, logits: torch.Tensor, batch: StepBatch, outcome: torch.Tensor) -> None:
        """Sample at some indices of a batch; `places` contains each row with rules or a grammar at most once."""
        index = upload(places, self._device)
        gathered = self._gather(batch.sample_rows[places], batch.sample_positions[index])
        own = logits[index]
        outcome[index] = self._pick(own, gathered, gathered.params.position, batch.positions_on_host[places])

    def _restrict(self, logits: torch.Tensor, gathered: _Gathered, positions: IntArray) -> torch.Tensor:
        """Return the logits after rules and grammars, in float32 if there are rules; may change `logits`."""
        rules = gathered.rules
        if rules is not None:
            changed = self._table.rules.apply(logits, rules, positions)
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
        """Return the rows' packed log-probabilities: first for sampled tokens, then for prompt tokens."""
        counts = [part.count for part in batch.prompt_parts]
        most = max((*counts, *(wanted.counts if wanted is not None else ())), default=0)
        found = []
        if raw is not None and wanted is not None:
            found.append(score(raw, tokens[wanted.index], most).packed())
        if batch.prompt_targets is not None:
            found.append(score(of_prompts, batch.prompt_targets, most).packed())
        return torch.cat(found) if found else None

    def _note_last_tokens(self) -> None:
        """Pass the last step's tokens to the rules and grammars that need them on the host."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        table = self._table
        for row, generation, token in pending.wait():
            if token >= 0 and table.generation[row] == generation and table.needs_host_tokens(row):
                table.note_token(row, token)

    def _gather_once(self, batch: StepBatch) -> _Gathered:
        """Return the parameters for the batch's rows; gather them again only if `membership` or the rows changed."""
        self._forget_former_rows()
        key = batch.sample_rows.tobytes()
        found = self._gathered.get(key)
        if found is None:
            found = self._gathered[key] = self._gather(batch.sample_rows, batch.sample_positions)
        return found

    def _forget_former_rows(self) -> None:
        if self._membership != self._table.membership or max(len(self._gathered), len(self._wanted)) >= _MOST_GATHERED:
            self._membership = self._table.membership
            self._gathered.clear()
            self._wanted.clear()

    def _gather(self, rows: IntArray, positions: torch.Tensor) -> _Gathered:
        rules = self._table.rules.batch(rows)
        grammars = self._table.grammars
        grammar_places = [place for place, row in enumerate(rows.tolist()) if row in grammars] if len(grammars) else []
        grammar_rows = rows[grammar_places]
        grammar_columns = np.stack((np.array(grammar_places, np.int64), grammar_rows)).astype(np.int64)
        grammar_index, grammar_lines = upload(grammar_columns, self._device)
        whole = single = None
        if self._split is not None:
            needed = self._table.needs_all_logits[rows]
            whole, single = (upload(np.flatnonzero(part), self._device) for part in (needed, ~needed))
        restricted = torch.cat([grammar_index] if rules is None else [rules.index, grammar_index])
        return _Gathered(
            self._table.sampling.tensors(rows, positions),
            rules,
            tuple(grammar_rows.tolist()),
            grammar_index,
            grammar_lines,
            restricted if len(restricted) else None,
            restricted.numel() > 0 and any(map(self._table.needs_host_tokens, rows.tolist())),
            whole,
            single,
        )

    def _find_wanted(self, batch: StepBatch) -> Wanted | None:
        rows = batch.sample_rows
        counts = self._table.sampling.logprobs[rows]
        places = np.flatnonzero(counts >= 0)
        if not len(places):
            return None
        return Wanted(
            index=upload(places, self._device),
            places=places,
            rows=tuple(rows[places].tolist()),
            generations=tuple(self._table.generation[rows[places]].tolist()),
            counts=tuple(counts[places].tolist()),
        )
