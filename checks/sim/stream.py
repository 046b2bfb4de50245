"""One request as its client and front end see it, with checks on everything that the core sends about it.

Every token is compared with the oracle's on arrival, in O(1). The stream's history must justify the reason for its end.
"""

import math
from collections.abc import Callable

import numpy as np

from checks.sim.sites import Epoch
from checks.sim.traffic import Demand
from records.rules.oracle import (
    SCORED,
    expected_embedding,
    extend,
    scores_of,
    token_after,
    value_of,
)
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import EndReason
from shared.columns import to_column
from shared.frames import TOKEN_BYTES
from shared.request_spec import Pooling, RequestSpec

_TRACEPARENT = "00-11111111111111111111111111111111-2222222222222222-01"


class Stream:
    """A stream from its submission to its end."""

    def __init__(self, name: StreamName, demand: Demand, now: float) -> None:
        self.name = name
        self.demand = demand
        self.arrival = now
        """Time at which a core last received the stream."""
        self.known = False
        """Whether the present core has the stream."""
        self.was_accepted = False
        """Whether an earlier core has accepted it."""
        self.end: EndReason | None = None
        self.identity = b""
        """Identity with which a client resumes the request; empty for none."""
        self.is_twin = False
        """Whether another stream with the same identity is live."""
        self.num_scored = 0
        """Tokens whose log-probabilities have arrived."""
        self.tokens: list[int] = []
        self.allowed = demand.credit // TOKEN_BYTES
        """Number of tokens that the credit covers."""
        self._spare = demand.credit % TOKEN_BYTES
        self._value = value_of(demand.prompt)
        self.last_move = now
        """Time of the last token or credit."""
        self.must_end = False
        """Whether the newest token was the last."""
        self.deadline = _after(now, demand.deadline_s)
        self.ttft_deadline = _after(now, demand.ttft_s)
        self.total_deadline = _after(now, demand.total_s)
        self.cancel_sent = False
        self.stop_sent = False
        self.row_failed = False
        """Whether one of its rows was reported as failed."""
        self.context = math.inf
        """Context length of the worker that ran the request last."""
        self.epoch: Epoch | None = None
        """Epoch of the worker that has the request, in a row or in its last step."""
        self.row: tuple[int, int] | None = None
        """Its (row, generation) on that worker."""
        self.home: Epoch | None = None
        """Worker that had the request before its last admission."""
        self.placements = 0
        self.killed_workers = 0
        """Number of workers that it has killed."""
        self.preemptions = 0
        self.preempted_at = -1
        """Number of tokens at the last preemption."""
        self.eventful = demand.take_s is not None or demand.cancel_at is not None or demand.stop_string_at is not None
        """Whether the front end is about to act on its tokens."""
        self.untaken = 0
        """Bytes that the reader has not read."""
        self.granting = False
        """Whether the reader is about to read them."""
        self.unsettled_until: tuple[Epoch, int] | None = None
        """The newest tokens are unknown until the result of this step arrives."""

    @property
    def num_known(self) -> int:
        """Number of prompt tokens and received tokens."""
        return len(self.demand.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Number of tokens in the longest possible sequence, on the worker that ran the request last."""
        longest = len(self.demand.prompt) + self.demand.max_tokens
        return longest if longest < self.context else int(self.context)

    @property
    def is_unsettled(self) -> bool:
        """Return whether a step in flight still names a row that the stream has left."""
        if self.unsettled_until is None:
            return False
        epoch, step = self.unsettled_until
        return not epoch.is_lost and epoch.model.answered_step < step

    @property
    def returns_home(self) -> bool:
        """Whether the worker that preempted the request is draining and takes it back."""
        home = self.home
        return home is not None and not home.is_lost and home.draining and self.num_known < home.context

    def first_tokens(self, count: int) -> list[int]:
        """Return the first tokens of its sequence."""
        return [*self.demand.prompt, *self.tokens][:count]

    @property
    def starved(self) -> bool:
        """Whether the reader has no credit left."""
        return len(self.tokens) >= self.allowed

    def go_on_from(self, tokens: list[int]) -> None:
        """Begin with tokens that were already delivered. The credit is for further tokens."""
        self.tokens = tokens
        self.allowed += len(tokens)
        self._value = value_of([*self.demand.prompt, *tokens])

    def may_run_on(self, fingerprint: str) -> bool:
        """Return whether the model with this fingerprint may compute the stream."""
        return self.demand.model in ("", fingerprint)

    @property
    def is_under_way(self) -> bool:
        """Whether the stream was accepted and can no longer be refused."""
        return self.was_accepted or self.placements > 0 or len(self.tokens) > 0

    def begin(self, now: float, *, accepted: bool) -> None:
        """Submit the stream to a core; `accepted` means that an earlier core has accepted it."""
        self.known = True
        self.was_accepted = accepted
        self.num_scored = len(self.tokens)
        self.arrival = self.last_move = now
        self.context = math.inf
        self.epoch = None
        self.placements = self.preemptions = self.killed_workers = 0
        self.preempted_at = -1
        self.unsettled_until = None

    def submission(self, *, again: bool = False, accepted: bool = False) -> ev.RequestArrived:
        """Return the stream's submission for a core that does not know it.

        Args:
            again: whether the core may know the request.
            accepted: whether an earlier core has accepted it.
        """
        demand = self.demand
        credit = (self.allowed - len(self.tokens)) * TOKEN_BYTES + self._spare
        return ev.RequestArrived(
            frontend=self.name.frontend,
            stream=self.name.stream,
            spec=RequestSpec(
                request_id=f"r{self.name.stream}",
                num_prompt_tokens=len(demand.prompt),
                max_tokens=demand.max_tokens,
                stop_token_ids=to_column(sorted(demand.stops)),
                sampling=SCORED if demand.scored else b"",
                grammar=demand.grammar,
                pooling=demand.pooling,
                computes_whole_prompt=demand.scored,
                tenant=demand.tenant,
                request_class=demand.tenant,
                priority=demand.priority,
                expected_output_tokens=demand.expected_output_tokens,
                cache_scope=demand.salt,
                retention_s=demand.retention_s,
                retention_priority=demand.retention_priority,
                expected_pause_s=demand.expected_pause_s,
                session=demand.session,
                ends_session=demand.ends_session,
                model=demand.model,
                identity=self.identity,
                traceparent=_TRACEPARENT if demand.traced else "",
            ),
            token_ids=np.array([*demand.prompt, *self.tokens], np.int32),
            credit=credit,
            deadline=self.deadline,
            ttft_deadline=self.ttft_deadline,
            total_deadline=self.total_deadline,
            again=again,
            accepted=accepted,
        )

    def take_scores(self, effect: ef.ScoresReady) -> None:
        """Check log-probabilities from the core: for the prompt, or for the next token without any."""
        if self.end is not None or not self.known or not self.demand.scored:
            raise ViolationError("scores.unasked", f"scores of token {effect.first_index}", self.name)
        if effect.of_prompt:
            sound = (effect.first_index, effect.scores) == (1, scores_of(self.demand.prompt[1:]))
        else:
            index, value = max(self.num_scored, len(self.tokens)), self._value
            for position in range(len(self.tokens), index):
                value = extend(value, token_after(value), len(self.demand.prompt) + position)
            sound = (effect.first_index, effect.scores) == (index, scores_of([token_after(value)]))
            self.num_scored = index + 1
        if not sound:
            raise ViolationError("scores.wrong", f"{effect} after {len(self.tokens)} tokens", self.name)

    def grant(self, credit: int, now: float) -> None:
        """Return `credit` bytes of credit, which the reader has consumed."""
        tokens, self._spare = divmod(self._spare + credit, TOKEN_BYTES)
        self.allowed += tokens
        self.last_move = now

    def forget(self, count: int) -> None:
        """Remove the last `count` tokens, which never reached the front end."""
        del self.tokens[len(self.tokens) - count :]
        self._value = value_of([*self.demand.prompt, *self.tokens])

    def take(self, index: int, token: int, now: float) -> None:
        """Check a token from the core."""
        if self.end is not None or self.must_end or not self.known:
            raise ViolationError("stream.after_end", f"token {index} after the end", self.name)
        if index != len(self.tokens):
            raise ViolationError("stream.order", f"token {index} after {len(self.tokens)} tokens", self.name)
        if self.demand.pooling is not Pooling.NONE:
            raise ViolationError("stream.token", "a token of a request for an embedding", self.name)
        expected = token_after(self._value)
        if token != expected:
            raise ViolationError("stream.token", f"token {index} is {token}, not {expected}", self.name)
        self._value = extend(self._value, token, len(self.demand.prompt) + index)
        self.tokens.append(token)
        if self.demand.scored and self.num_scored < len(self.tokens):
            raise ViolationError("scores.missing", f"token {index} came without", self.name)
        self.last_move = now
        self.must_end = token in self.demand.stops or len(self.tokens) >= self.demand.max_tokens

    def finish(self, effect: ef.RequestEnded, justified: Callable[[EndReason], str | None]) -> None:
        """Check the end of the stream.

        Args:
            effect: the end as the core reports it.
            justified: what contradicts a reason that depends on more than the stream; None for no contradiction.
        """
        if self.end is not None or not self.known:
            raise ViolationError("stream.ends_once", f"{effect.reason} after {self.end}", self.name)
        if self.num_scored > len(self.tokens):
            what = f"scores of {self.num_scored} tokens, {len(self.tokens)} were delivered"
            raise ViolationError("scores.discarded", what, self.name)
        objection = self._objection(effect) or justified(effect.reason)
        if objection is not None:
            raise ViolationError("stream.reason", f"{effect.reason.name} ({effect.message}): {objection}", self.name)
        self.end = effect.reason

    def _objection(self, effect: ef.RequestEnded) -> str | None:
        """Return what contradicts the core's end reason, as far as the stream itself shows."""
        count = len(self.tokens)
        stopped = bool(self.tokens) and self.tokens[-1] in self.demand.stops
        if effect.reason is not EndReason.STOP_STRING and effect.completion_tokens != count:
            return f"{effect.completion_tokens} tokens counted, {count} delivered"
        if effect.preemptions != self.preemptions and self.demand.traced:
            return f"{effect.preemptions} preemptions counted, {self.preemptions} seen"
        if not 0 <= effect.cached_prompt_tokens <= len(self.demand.prompt):
            return f"{effect.cached_prompt_tokens} of {len(self.demand.prompt)} prompt tokens from the cache"
        match effect.reason:
            case EndReason.STOP:
                return None if stopped and effect.stop_token_id == self.tokens[-1] else "no stop token"
            case EndReason.LENGTH:
                return "a stop token" if stopped or self.demand.pooling is not Pooling.NONE else None
            case EndReason.EMBEDDED:
                if self.demand.pooling is Pooling.NONE:
                    return "it wants tokens"
                same = effect.embedding == expected_embedding(self.demand.prompt, self.demand.pooling)
                return None if same else "another embedding"
            case EndReason.STOP_STRING:
                return None if self.stop_sent and effect.completion_tokens == self.demand.keep_tokens else "not found"
            case EndReason.DUPLICATE:
                return None if self.is_twin else "no other stream has its identity"
            case EndReason.ROW_FAILED:
                return None if self.row_failed else "no row of it failed"
        return None


def _after(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds


def prefix_hashes(tokens: list[int], scope: bytes) -> list[int]:
    """Return a hash of each prefix of a sequence under a cache scope."""
    hashes, present = [], hash(scope)
    for token in tokens:
        present = hash((present, token))
        hashes.append(present)
    return hashes
