"""Sampling from logits whose vocabulary is divided among the ranks of a group.

For rows that are greedy, or random without filters, the ranks exchange only their parts' best score and token. Other
rows need the whole distribution (top-k, top-p, min-p, typical-p, log-probabilities), or rules and grammars, whose state
only rank 0 has. Rank 0 gathers the logits of only these rows, samples the step's tokens, and broadcasts them.
"""

import torch
from torch.nn.functional import pad

from kernels.sampling import SamplingTensors
from kernels.split_sampling import best_in_part, best_of_parts
from worker_svc.ranks.group import Group
from worker_svc.ranks.shard import Shard


class SplitLogits:
    """Exchanges logits `[S, vocabulary of the rank]` between the ranks of a group."""

    def __init__(self, group: Group, vocab_size: int) -> None:
        self._group = group
        self._vocab_size = vocab_size
        self._part = group.shard.vocabulary(vocab_size)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self._group.rank == 0

    def sample(self, logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        """Sample rows without filters: `[S] int64`, -1 for a row without finite logits. Equal on all ranks."""
        if not len(logits):
            return torch.zeros(0, dtype=torch.int64, device=logits.device)
        return best_of_parts(self._group.all_gather(best_in_part(logits, params, self._part.begin)))

    def gather(
        self, logits: torch.Tensor, whole: torch.Tensor, single: torch.Tensor, params: SamplingTensors
    ) -> torch.Tensor | None:
        """Return logits `[S + P, vocab_size]` on rank 0, and None on the others.

        Args:
            logits: `[S + P, vocabulary of the rank]`.
            whole: `[n] int64`, not empty: places of the rows whose logits are needed.
            single: `[m] int64`: indices of all other rows. For these rows, the result contains each rank's best token
                and -inf elsewhere, so that the sampler finds the same token as with all logits.
            params: the parameters of the first S rows.
        """
        length = Shard(0, self._group.size).vocabulary(self._vocab_size).length  # The longest part.
        found = self._group.gather(pad(logits[whole], (0, length - logits.shape[1]), value=-torch.inf))
        candidates = self._candidates(logits, single, params) if len(single) else None
        if not self.leads:
            return None
        joined = torch.cat(found, dim=1)[:, : self._vocab_size]
        if candidates is None:
            return joined.index_select(0, whole.argsort())
        result = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        result.index_copy_(0, whole, joined)
        for values, tokens in zip(*candidates, strict=True):
            result[single, tokens] = values.to(result.dtype)
        return result

    def share(self, tokens: torch.Tensor | None, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return rank 0's tokens `[num_rows] int32`. Rank 0 passes them; the other ranks pass None."""
        if tokens is None:
            tokens = torch.empty(num_rows, dtype=torch.int32, device=device)
        return self._group.broadcast(tokens) if num_rows else tokens

    def _candidates(
        self, logits: torch.Tensor, single: torch.Tensor, params: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the rows' best tokens, and these tokens, `[size, m]` each."""
        best = best_in_part(logits[: len(params.temperature)], params, self._part.begin)[:, 1][single].to(torch.int64)
        # If no token was found: a non-finite value, or -inf, at the first token of the part.
        tokens = best.clamp(min=self._part.begin)
        values = logits[single, tokens - self._part.begin].to(torch.float32)
        values = values.masked_fill(best == -1, torch.nan).masked_fill(best == -2, -torch.inf)
        found = self._group.all_gather(torch.stack((values.view(torch.int32), tokens.to(torch.int32))))
        return found[:, 0].contiguous().view(torch.float32), found[:, 1].to(torch.int64)
