"""Acceptance: which drafts of a record were accepted, and which ones of a simulation are.

The random numbers that sample a token depend only on the request's seed and the token's position. So a request has the
same tokens however many drafts are verified, and whether a draft is accepted depends mostly on its position: where the
text repeats itself, drafts are right. A record therefore gives each position of a request an *outcome*: the draft for
it was accepted, was rejected, or the worker proposed none although the plan allowed one. In a simulation, the same
request has the same outcome there.

The outcome of other positions is unknown: the plan allowed no draft for them, or the limit ended before them. It is
drawn, given the last outcome of the same request. The probabilities are counted over all requests of the record. So
outcomes keep their runs: after an accepted draft, another one is likelier.

Drafts behind a rejected one are wasted. Their number matters for the time of the step only.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Outcome(IntEnum):
    """Outcome of the draft for one position of a request."""

    UNKNOWN = 0
    ACCEPTED = 1
    REJECTED = 2
    MISSING = 3
    """A draft was allowed, and the worker proposed none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance of drafts, learned from a record."""

    following: tuple[tuple[float, float, float], ...]
    """Probability of an accepted, a rejected and a missing draft, by the outcome before; `UNKNOWN`: there is none."""
    wasted_share: float
    """Drafts that were verified behind rejected ones, relative to as many as the limits allowed there."""
    positions: int
    """Known outcomes that this was learned from."""

    def draw(self, before: int, rng: random.Random) -> int:
        """Return an outcome after another one of the same request."""
        accepted, rejected, _ = self.following[before]
        share = rng.random()
        if share < accepted:
            return Outcome.ACCEPTED
        return Outcome.REJECTED if share < accepted + rejected else Outcome.MISSING


class History:
    """Outcomes of one request in a record."""

    def __init__(self) -> None:
        self.outcomes = bytearray()
        """By index among the generated tokens."""
        self.num_wasted = self.num_wasted_allowed = 0
        """Drafts behind rejected ones, and as many as were allowed there."""

    def note(self, index: int, most: int, verified: int, accepted: int) -> None:
        """Note the drafts of one step.

        Args:
            index: index of the step's first token among the request's generated tokens; the first draft is for it.
            most: drafts that were allowed.
            verified: drafts that the worker verified.
            accepted: those of them that were accepted.
        """
        known = [Outcome.ACCEPTED] * accepted
        if verified > accepted:
            known.append(Outcome.REJECTED)
            self.num_wasted += verified - accepted - 1
            self.num_wasted_allowed += max(most, verified) - accepted - 1
        elif verified < most:
            known.append(Outcome.MISSING)
        self.outcomes.extend(bytes(max(0, index + len(known) - len(self.outcomes))))
        self.outcomes[index : index + len(known)] = bytes(known)


def learn(histories: Sequence[History]) -> Acceptance | None:
    """Return the acceptance in the histories of all requests; None if no draft was allowed in any of them."""
    # One of each, so that an outcome that follows no other one in the record has probabilities as well.
    counts = [[1, 1, 1] for _ in Outcome]
    positions = 0
    for history in histories:
        known = history.outcomes.replace(bytes([Outcome.UNKNOWN]), b"")
        positions += len(known)
        before = int(Outcome.UNKNOWN)
        for outcome in known:
            counts[before][outcome - 1] += 1
            before = outcome
    if not positions:
        return None
    allowed = sum(history.num_wasted_allowed for history in histories)
    return Acceptance(
        following=tuple((a / (a + r + m), r / (a + r + m), m / (a + r + m)) for a, r, m in counts),
        wasted_share=sum(history.num_wasted for history in histories) / max(1, allowed),
        positions=positions,
    )


class Drafting:
    """Drafts of the requests of a simulation."""

    def __init__(self, acceptance: Acceptance, known: Sequence[bytes], rng: random.Random) -> None:
        """Begin a simulation.

        Args:
            acceptance: draws the outcomes that are not known.
            known: outcomes of each request, by index among its generated tokens.
            rng: decides what is not known.
        """
        self._acceptance = acceptance
        self._known = known
        self._rng = rng
        self._last = bytearray(len(known))
        """By request: its last outcome."""

    def verify(self, request: int, index: int, most: int) -> tuple[int, int]:
        """Return how many drafts of a request are verified in a step, and how many of them are accepted.

        Args:
            request: number of the request.
            index: index of the step's first token among its generated tokens.
            most: drafts that are allowed.
        """
        known, outcome = self._known[request], int(self._last[request])
        accepted = 0
        while accepted < most:
            at = index + accepted
            found = known[at] if at < len(known) else Outcome.UNKNOWN
            outcome = found or self._acceptance.draw(outcome, self._rng)
            if outcome != Outcome.ACCEPTED:
                break
            accepted += 1
        self._last[request] = outcome
        if outcome != Outcome.REJECTED:
            return accepted, accepted
        allowed = most - accepted - 1
        wasted = sum(self._rng.random() < self._acceptance.wasted_share for _ in range(allowed))
        return accepted + 1 + wasted, accepted
