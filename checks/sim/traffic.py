"""Client requests and their behaviour: one `Demand` per request, drawn on arrival."""

import random
from dataclasses import dataclass, replace

from checks.sim.faults import Fault, FaultRates
from checks.sim.scenario import MODELS, TENANTS, Pace, TrafficShape
from records.rules.oracle import VOCAB, expected_output
from shared.request_spec import Pooling

_ENDLESS = 1 << 30
UNUSABLE = b"unusable"
_COMMON = b"grammar a"
GRAMMARS = (_COMMON, _COMMON, b"grammar b", b"grammar c", UNUSABLE)
"""Grammars of requests. Workers cannot compile the last one."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One request and the behaviour of its client."""

    prompt: list[int]
    max_tokens: int
    stops: frozenset[int]
    salt: bytes
    tenant: str
    priority: int
    expected_output_tokens: int
    traced: bool
    deadline_s: float | None
    """Deadline. All times count from the submission."""
    ttft_s: float | None
    total_s: float | None
    credit: int
    """Reader window in bytes."""
    take_s: float | None
    """How long the reader takes to read a message and return its credit; None if it never reads."""
    cancel_at: int | None
    """Number of tokens after which the client leaves."""
    cancel_s: float | None
    stop_string_at: int | None
    """Number of tokens after which the front end finds a stop string."""
    keep_tokens: int
    twice: bool
    """Whether the front end submits it twice, as if unsure about the first submission."""
    valid: bool
    grammar: bytes = b""
    scored: bool = False
    """Whether it requests the log-probabilities for its output and for its prompt."""
    identified: bool = False
    """Whether a client resumes it."""
    model: str = ""
    """Fingerprint of the only model that may compute it; "" for any."""
    poison_at: int | None = None
    """Number of generated tokens after which the request kills every worker that computes it."""
    pooling: Pooling = Pooling.NONE
    """Pooling if it requests an embedding instead of tokens."""
    retention_s: float = 0.0
    retention_priority: int = 0
    expected_pause_s: float = 0.0
    session: bytes = b""
    ends_session: bool = False


_SESSIONS = (b"x", b"y")
"""Names of sessions."""
_LAST_TURN = 0.2
"""Share of the turns of named sessions that are the last one."""


class Traffic:
    """Draws demands."""

    def __init__(self, rng: random.Random, shape: TrafficShape, pace: Pace, faults: FaultRates) -> None:
        self._rng = rng
        self._shape = shape
        self._pace = pace
        self._faults = faults
        self._hints = random.Random(f"hints of {shape}")
        self._alphabet = range(shape.alphabet)
        self._families = [self._tokens(rng.randint(1, shape.longest_prompt)) for _ in range(shape.families)]

    def draw(self, earlier: list[int] | None) -> Demand:
        """Draw one demand.

        Args:
            earlier: an earlier request's prompt and output; this request may continue that conversation.
        """
        rng, shape = self._rng, self._shape
        prompt = self._prompt(earlier)
        max_tokens = rng.randint(1, max(1, int(shape.longest_output * rng.random())))
        deadlines = [
            rng.uniform(1, shape.steps_per_token * max_tokens) * self._pace.step
            if rng.random() < shape.deadlines
            else None
            for _ in range(3)
        ]
        tenant = rng.choice(TENANTS)
        credit = take_s = None
        if shape.credit_tokens and rng.random() < 0.9:
            credit = rng.choice((0, rng.randint(1, 4 * shape.credit_tokens)))
            take_s = self._pace.step * 10 ** rng.uniform(-2, 0.7)
        demand = Demand(
            prompt=prompt,
            max_tokens=max_tokens,
            stops=self._stops(prompt, max_tokens),
            salt=b"" if shape.shared_salt else tenant.encode(),
            tenant=tenant,
            priority=rng.choice((0, 0, 1, 3)),
            expected_output_tokens=rng.choice((0, 0, max_tokens, 5)),
            traced=rng.random() < shape.traced,
            deadline_s=deadlines[0],
            ttft_s=deadlines[1],
            total_s=deadlines[2],
            credit=_ENDLESS if credit is None else credit,
            take_s=take_s,
            cancel_at=None,
            cancel_s=None,
            stop_string_at=None,
            keep_tokens=0,
            twice=False,
            valid=True,
        )
        demand = self._with_faults(self._with_extras(demand))
        return self._embedding(demand) if rng.random() < shape.embeds else demand

    def _embedding(self, demand: Demand) -> Demand:
        """Return the demand as an embedding request, in which no event depends on tokens."""
        return replace(
            demand,
            pooling=self._rng.choice((Pooling.LAST, Pooling.MEAN)),
            max_tokens=1,
            stops=frozenset(),
            cancel_at=None,
            stop_string_at=None,
            poison_at=None if demand.poison_at is None else 0,
            grammar=b"",
            scored=False,
            identified=False,
        )

    def _with_extras(self, demand: Demand) -> Demand:
        rng, shape = self._rng, self._shape
        if shape.grammars and rng.random() < shape.grammars:
            demand = replace(demand, grammar=rng.choice(GRAMMARS))
        if shape.scored and rng.random() < shape.scored:
            demand = replace(demand, scored=True)
        if shape.identified and rng.random() < shape.identified:
            demand = replace(demand, identified=True)
        if shape.models and rng.random() < shape.models:
            demand = replace(demand, model=rng.choice((MODELS[0], *MODELS)))
        hints = self._hints
        if shape.retained and hints.random() < shape.retained:
            demand = replace(
                demand,
                retention_s=hints.choice((0.0, self._pace.step * 10 ** hints.uniform(0, 3))),
                retention_priority=hints.choice((0, 0, 1, 9)),
                expected_pause_s=hints.choice((0.0, self._pace.step * 10 ** hints.uniform(-1, 3))),
            )
        if shape.named_sessions and hints.random() < shape.named_sessions:
            demand = replace(demand, session=hints.choice(_SESSIONS), ends_session=hints.random() < _LAST_TURN)
        return demand

    def _with_faults(self, demand: Demand) -> Demand:
        rng, pace = self._rng, self._pace
        for fault, probability in self._faults.of_requests.items():
            if rng.random() >= probability:
                continue
            match fault:
                case Fault.CANCEL if rng.random() < 0.5:
                    demand = replace(demand, cancel_at=rng.randint(1, demand.max_tokens))
                case Fault.CANCEL:
                    demand = replace(demand, cancel_s=rng.uniform(0, 2 * demand.max_tokens) * pace.step)
                case Fault.STOP_STRING:
                    found_at = rng.randint(1, demand.max_tokens)
                    demand = replace(demand, stop_string_at=found_at, keep_tokens=rng.randint(0, found_at))
                case Fault.SLOW_READER:
                    credit = rng.randint(0, 40)
                    demand = replace(demand, credit=credit, take_s=rng.uniform(1, 100) * pace.step)
                case Fault.STALLED_READER:
                    demand = replace(demand, credit=rng.randint(0, 40), take_s=None)
                case Fault.SUBMITTED_TWICE:
                    demand = replace(demand, twice=True)
                case Fault.POISON:
                    demand = replace(demand, poison_at=rng.choice((0, 0, rng.randrange(demand.max_tokens))))
                case Fault.INVALID_REQUEST:
                    demand = replace(demand, prompt=self._invalid(demand.prompt), valid=False)
        return demand

    def _invalid(self, prompt: list[int]) -> list[int]:
        kind = self._rng.randrange(3)
        if kind == 0:
            return [VOCAB]
        return [*prompt, VOCAB if kind == 1 else -1]

    def _prompt(self, earlier: list[int] | None) -> list[int]:
        rng, shape = self._rng, self._shape
        length = rng.randint(1, max(1, int(shape.longest_prompt * rng.random())))
        if rng.random() < shape.giants:
            return self._tokens(rng.randint(shape.context // 2, shape.context))
        if earlier is not None and len(earlier) < 2 * shape.longest_prompt and rng.random() < shape.conversations:
            return [*earlier, *self._tokens(rng.randint(1, 4))]
        if self._families and rng.random() < 0.7:
            family = rng.choice(self._families)
            kept = len(family) if rng.random() < 0.7 else rng.randint(1, len(family))
            return [*family[:kept], *self._tokens(rng.randint(0, 8))]
        return self._tokens(length)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(self._alphabet, k=count)

    def _stops(self, prompt: list[int], max_tokens: int) -> frozenset[int]:
        """Return stop tokens. Every third request generates one of them."""
        rng = self._rng
        stops = {rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 3, 9)))}
        if rng.random() < 0.3:
            stops.add(expected_output(prompt, rng.randint(1, max_tokens), set())[-1])
        return frozenset(stops)
