"""Logits rules: penalties, biases, forbidden tokens, bad words and minimum lengths.

The rules match the logits processors in `transformers`, in the same order: bias and token sets, repetition penalty,
frequency and presence penalties (as defined by OpenAI), bad words, minimum length. A row with rules has a *slot*: a
line in three tensors on the device, for each token's bias, each generated token's count, and the prompt's tokens. A
batch with such rows costs a fixed number of tensor operations. Sampled tokens are counted on the device, so sampling
does not wait for the host. Only bad words of several tokens need the last tokens on the host (`HostTokens`).

The state is rebuilt from the tokens at admission. A request that was preempted, or moved here, continues where it was.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from worker_svc.device.upload import upload
from worker_svc.interface.arrays import NO_IDS, Int32Array, IntArray
from worker_svc.interface.plan import Rules, SamplingParams

_FIRST_SLOTS = 4


@dataclass(slots=True)
class RowRules:
    """Rules of one row."""

    slot: int
    num_prompt: int
    """Number of prompt tokens; all later tokens are output."""
    repetition: float
    presence: float
    frequency: float
    has_bias: bool
    forbids: tuple[str, ...]
    """Fields of the request that forbid tokens, without `min_tokens`, as named in generation.proto."""
    min_tokens: int
    stop_token_ids: torch.Tensor
    """`[n] int64` on the device; empty unless `min_tokens` is set."""
    bad_words: tuple[tuple[int, ...], ...]
    """Sequences of at least two tokens."""
    recent: list[int] = field(default_factory=list)
    """The last `look_back` tokens; empty without bad words."""

    @property
    def penalised(self) -> bool:
        """Whether a penalty applies."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @property
    def look_back(self) -> int:
        """Number of past tokens that a bad word may cover."""
        return max((len(word) for word in self.bad_words), default=1) - 1

    def forbidden_next(self) -> list[int]:
        """Return the tokens that would complete a bad word."""
        recent = self.recent
        return [word[-1] for word in self.bad_words if tuple(recent[len(recent) - len(word) + 1 :]) == word[:-1]]


@dataclass(frozen=True, slots=True)
class LogitsBatch:
    """A batch's rows with rules; valid until the batch's rows change."""

    index: torch.Tensor
    """`[R] int64`: places of the rows in the batch."""
    slots: torch.Tensor
    """`[R] int64`: slots of the rows."""
    rules: tuple[RowRules, ...]
    rows: tuple[int, ...]
    places: tuple[int, ...]
    """`index` on the host."""
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """`[R, 1]` each: repetition, presence, frequency; None if no row has a penalty."""
    any_bias: bool
    any_min_tokens: bool


class LogitsRules:
    """Rules of all rows of one worker."""

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

    def __contains__(self, row: int) -> bool:
        return row in self._rules

    def needs_host_tokens(self, row: int) -> bool:
        """Return whether the host must know the row's last token before the next one is sampled."""
        rules = self._rules.get(row)
        return rules is not None and bool(rules.bad_words)

    def note_token(self, row: int, token: int) -> None:
        """Note the last token of a row for which `needs_host_tokens` is true."""
        rules = self._rules.get(row)
        if rules is not None and rules.bad_words:
            rules.recent = [*rules.recent, token][-rules.look_back :]

    def admit(self, row: int, params: SamplingParams, tokens: Int32Array, num_prompt: int) -> None:
        """Admit a row with its prompt and the output that was generated before."""
        self.leave(row)
        asked = params.rules
        if asked is None:
            return
        words = asked.bad_words
        slot = self._take_slot()
        rules = RowRules(
            slot=slot,
            num_prompt=num_prompt,
            repetition=asked.repetition_penalty,
            presence=asked.presence_penalty,
            frequency=asked.frequency_penalty,
            has_bias=bool(len(asked.bias_token_ids) or len(asked.allowed_token_ids) or len(asked.banned_token_ids)),
            forbids=_forbidding(asked),
            min_tokens=asked.min_tokens,
            stop_token_ids=self._upload(params.stop_token_ids if asked.min_tokens else NO_IDS),
            bad_words=words,
        )
        rules.recent = tokens[max(len(tokens) - rules.look_back, 0) :].tolist() if words else []
        self._rules[row] = rules
        if rules.has_bias:
            self._set_bias(slot, asked)
        if rules.penalised:
            self._count(slot, tokens, num_prompt)

    def forbidding(self, row: int, num_generated: int) -> list[str]:
        """Return the fields of the request that forbid tokens when `num_generated` tokens are generated."""
        rules = self._rules.get(row)
        if rules is None:
            return []
        return [*rules.forbids, *(("stop.min_tokens",) if num_generated < rules.min_tokens else ())]

    def leave(self, row: int) -> None:
        """Forget a row that leaves."""
        rules = self._rules.pop(row, None)
        if rules is not None:
            self._free.append(rules.slot)

    def clear(self) -> None:
        """Forget all rows."""
        for row in list(self._rules):
            self.leave(row)

    def batch(self, rows: IntArray) -> LogitsBatch | None:
        """Return the batch's rows with rules; None if there are none."""
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
        """Return the processed float32 logits `[R, vocab_size]` of the rows with rules.

        Args:
            logits: `[S, vocab_size]` of all rows.
            batch: the rows with rules.
            positions: `[S]`: absolute position of the token that each row samples next.
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
        """Count the sampled tokens `[S] int64` of the batch."""
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

    def _set_bias(self, slot: int, rules: Rules) -> None:
        line = np.zeros(self._vocab_size, np.float32)
        if len(rules.allowed_token_ids):
            line.fill(-np.inf)
            line[rules.allowed_token_ids] = 0
        np.add.at(line, rules.bias_token_ids, rules.bias_values)
        line[rules.banned_token_ids] = -np.inf
        self._bias[slot] = upload(line, self._device)

    def _count(self, slot: int, tokens: Int32Array, num_prompt: int) -> None:
        wide = tokens.astype(np.int64)
        self._in_prompt[slot, self._upload(wide[:num_prompt])] = True
        counts = np.bincount(wide[num_prompt:], minlength=self._vocab_size).astype(np.int32)
        self._generated[slot] = upload(counts, self._device)

    def _upload(self, ids: "np.ndarray[tuple[int], np.dtype[np.integer]]") -> torch.Tensor:
        return upload(ids.astype(np.int64), self._device)


def _forbidding(rules: Rules) -> tuple[str, ...]:
    names = {
        "sampling.allowed_token_ids": len(rules.allowed_token_ids) > 0,
        "sampling.banned_token_ids": len(rules.banned_token_ids) > 0,
        "sampling.bad_words": bool(rules.bad_words),
        "sampling.logit_bias": bool(np.isneginf(rules.bias_values).any()),
    }
    return tuple(name for name, forbids in names.items() if forbids)
