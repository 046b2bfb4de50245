"""What changes a row's logits before it samples: penalties, biases, forbidden tokens, bad words, least lengths.

The rules are those of `transformers`' processors (presence and frequency penalties: OpenAI's), in its order: bias and
token sets, repetition penalty, frequency and presence penalty, bad words, least length. A row with any of these has a
*slot*: a line in three tensors on the device, with what is added to each logit, how often each token was generated, and
which tokens the prompt holds. So a batch of such rows costs a fixed number of tensor operations, a batch without them
none at all; and since sampled tokens are counted on the device, nothing waits for the host.

Only words of several tokens must know the newest tokens on the host, see `HostTokens`.

All of it is rebuilt from the tokens at admission, so a request that was paused, or moved here, goes on as it was.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from protos.quire.plan.v1 import plan_pb2
from shared.columns import Int32Array, from_column, from_columns
from worker_svc.block_tables import IntArray
from worker_svc.device import upload
from worker_svc.errors import PlanError

_FIRST_SLOTS = 4


@dataclass(slots=True)
class RowRules:
    """The rules of one row."""

    slot: int
    num_prompt: int
    """Prompt tokens; what follows them is output."""
    repetition: float
    presence: float
    frequency: float
    has_bias: bool
    min_tokens: int
    stop_token_ids: torch.Tensor
    """`[n] int64` on the device; empty unless `min_tokens` is set."""
    bad_words: tuple[tuple[int, ...], ...]
    """Sequences of at least two tokens."""
    recent: list[int] = field(default_factory=list)
    """The last tokens, as many as the longest bad word looks back; empty without bad words."""

    @property
    def penalised(self) -> bool:
        """Whether a penalty applies."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @property
    def look_back(self) -> int:
        """How many tokens before the next one a bad word may cover."""
        return max((len(word) for word in self.bad_words), default=1) - 1

    def forbidden_next(self) -> list[int]:
        """Tokens that would complete a bad word."""
        recent = self.recent
        return [word[-1] for word in self.bad_words if tuple(recent[len(recent) - len(word) + 1 :]) == word[:-1]]


@dataclass(frozen=True, slots=True)
class LogitsBatch:
    """The rows of a batch that have rules; made once for as long as the batch has the same rows."""

    index: torch.Tensor
    """`[R] int64`: their places in the batch."""
    slots: torch.Tensor
    """`[R] int64`."""
    rules: tuple[RowRules, ...]
    rows: tuple[int, ...]
    places: tuple[int, ...]
    """`index` on the host."""
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """`[R, 1]` each: repetition, presence, frequency; None when no row has any."""
    any_bias: bool
    any_min_tokens: bool


class LogitsRules:
    """The rules of all rows of one worker."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rules: dict[int, RowRules] = {}
        self._free: list[int] = []
        self._bias = torch.zeros(0, vocab_size, device=device)
        self._generated = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return len(self._rules)

    def needs_host_tokens(self, row: int) -> bool:
        """Whether the row's next token must not be chosen before its last one is known on the host."""
        rules = self._rules.get(row)
        return rules is not None and bool(rules.bad_words)

    def note_token(self, row: int, token: int) -> None:
        """The row's last token, which `needs_host_tokens` asked for."""
        rules = self._rules.get(row)
        if rules is not None and rules.bad_words:
            rules.recent = [*rules.recent, token][-rules.look_back :]

    def admit(self, row: int, params: plan_pb2.SamplingParams, tokens: Int32Array, num_prompt: int) -> None:
        """A row arrives with its tokens, those generated before it came included.

        Raises:
            PlanError: parameters that make no sense.
        """
        self.leave(row)
        if not _has_rules(params):
            return
        ids, values = from_columns(params.bias_token_ids, params.bias_values)
        bias = values.view(np.float32)
        allowed, banned = from_column(params.allowed_token_ids), from_column(params.banned_token_ids)
        stops = from_column(params.stop_token_ids) if params.min_tokens else np.zeros(0, np.int32)
        words = tuple(tuple(from_column(word).tolist()) for word in params.bad_words)
        numbers = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if not (np.isfinite(numbers).all() and params.repetition_penalty >= 0 and not np.isnan(bias).any()):
            raise PlanError("admission: a penalty or bias that is no number, or a negative repetition penalty")
        for column in (ids, allowed, banned, stops, *(np.array(word, np.int32) for word in words)):
            if len(column) and not 0 <= int(column.min()) <= int(column.max()) < self._vocab_size:
                raise PlanError("admission: sampling names a token outside the vocabulary")
        if any(len(word) < 2 for word in words):
            raise PlanError("admission: a bad word of less than two tokens")
        slot = self._take_slot()
        rules = RowRules(
            slot=slot,
            num_prompt=num_prompt,
            repetition=params.repetition_penalty or 1.0,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            has_bias=bool(len(ids) or len(allowed) or len(banned)),
            min_tokens=params.min_tokens,
            stop_token_ids=self._upload(stops),
            bad_words=words,
        )
        rules.recent = tokens[max(len(tokens) - rules.look_back, 0) :].tolist() if words else []
        self._rules[row] = rules
        if rules.has_bias:
            self._set_bias(slot, ids, bias, allowed, banned)
        if rules.penalised:
            self._count(slot, tokens, num_prompt)

    def leave(self, row: int) -> None:
        """The row is over."""
        rules = self._rules.pop(row, None)
        if rules is not None:
            self._free.append(rules.slot)

    def clear(self) -> None:
        """All rows are over."""
        for row in list(self._rules):
            self.leave(row)

    def batch(self, rows: IntArray) -> LogitsBatch | None:
        """Those of the batch's rows that have rules, or None."""
        if not self._rules:
            return None
        found = [(place, row) for place, row in enumerate(rows.tolist()) if row in self._rules]
        if not found:
            return None
        rules = tuple(self._rules[row] for _, row in found)
        penalties = None
        if any(each.penalised for each in rules):
            columns = np.array([(each.repetition, each.presence, each.frequency) for each in rules], np.float32)
            repetition, presence, frequency = upload(columns.T.copy(), self._device).unsqueeze(2)
            penalties = (repetition, presence, frequency)
        places = tuple(place for place, _ in found)
        return LogitsBatch(
            index=self._upload(np.array(places)),
            slots=self._upload(np.array([each.slot for each in rules])),
            rules=rules,
            rows=tuple(row for _, row in found),
            places=places,
            penalties=penalties,
            any_bias=any(each.has_bias for each in rules),
            any_min_tokens=any(each.min_tokens for each in rules),
        )

    def apply(self, logits: torch.Tensor, batch: LogitsBatch, positions: IntArray) -> torch.Tensor:
        """The processed float32 logits `[R, vocab_size]` of the batch's rows with rules.

        Args:
            logits: `[S, vocab_size]` of all rows.
            batch: the rows with rules.
            positions: `[S]`: absolute position of the token that each row samples now.
        """
        scores = logits[batch.index].to(torch.float32)
        slots = batch.slots
        if batch.any_bias:
            scores = scores + self._bias[slots]
        if batch.penalties is not None:
            repetition, presence, frequency = batch.penalties
            generated = self._generated[slots]
            seen = (generated > 0) | self._in_prompt[slots]
            penalised = torch.where(scores < 0, scores * repetition, scores / repetition)
            scores = torch.where(seen, penalised, scores)
            scores = scores - frequency * generated - presence * (generated > 0)
        for line, rules in enumerate(batch.rules):
            if rules.bad_words:
                forbidden = rules.forbidden_next()
                if forbidden:
                    scores[line, self._upload(np.array(forbidden))] = -torch.inf
        if batch.any_min_tokens:
            for line, rules in enumerate(batch.rules):
                if int(positions[batch.places[line]]) - rules.num_prompt < rules.min_tokens:
                    scores[line, rules.stop_token_ids] = -torch.inf
        return scores

    def count_sampled(self, batch: LogitsBatch, tokens: torch.Tensor) -> None:
        """The batch's rows have sampled `tokens` `[S] int64`."""
        if batch.penalties is not None:
            self._generated[batch.slots, tokens[batch.index]] += 1

    def _take_slot(self) -> int:
        if not self._free:
            have = len(self._bias)
            more = max(have, _FIRST_SLOTS)
            grown = []
            for tensor in (self._bias, self._generated, self._in_prompt):
                grown.append(torch.cat((tensor, torch.zeros(more, *tensor.shape[1:]).to(tensor))))
            self._bias, self._generated, self._in_prompt = grown
            self._free = list(range(have + more - 1, have - 1, -1))
        slot = self._free.pop()
        self._bias[slot] = 0
        self._generated[slot] = 0
        self._in_prompt[slot] = False
        return slot

    def _set_bias(self, slot: int, ids: Int32Array, bias: "np.ndarray[tuple[int], np.dtype[np.float32]]",
                  allowed: Int32Array, banned: Int32Array) -> None:  # fmt: skip
        line = np.zeros(self._vocab_size, np.float32)
        if len(allowed):
            line.fill(-np.inf)
            line[allowed] = 0
        np.add.at(line, ids, bias)
        line[banned] = -np.inf
        self._bias[slot] = upload(line, self._device)

    def _count(self, slot: int, tokens: Int32Array, num_prompt: int) -> None:
        wide = tokens.astype(np.int64)
        self._in_prompt[slot, self._upload(wide[:num_prompt])] = True
        counts = np.bincount(wide[num_prompt:], minlength=self._vocab_size).astype(np.int32)
        self._generated[slot] = upload(counts, self._device)

    def _upload(self, ids: "np.ndarray[tuple[int], np.dtype[np.integer]]") -> torch.Tensor:
        return upload(ids.astype(np.int64), self._device)


def _has_rules(params: plan_pb2.SamplingParams) -> bool:
    return bool(
        params.repetition_penalty not in (0, 1)
        or params.presence_penalty
        or params.frequency_penalty
        or params.bias_token_ids
        or params.allowed_token_ids
        or params.banned_token_ids
        or params.bad_words
        or (params.min_tokens and params.stop_token_ids)
    )
