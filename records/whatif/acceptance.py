"""Draft acceptance: learned from a record, and applied to the drafts in a simulation.

The random numbers that sample a token depend only on the request's seed and the token's position. So a request has the
same tokens regardless of the number of verified drafts, and whether a draft is accepted depends mostly on its position:
where the text repeats itself, drafts are correct. A record therefore gives each position of a request an *outcome*: the
position's draft was accepted or rejected, or the worker proposed none although the plan allowed one. In a simulation,
the same request has the same outcome at the same position.

For other positions the outcome is unknown, because the plan allowed no draft there. It is sampled, given the last
outcome of the same request. The probabilities are counted over all requests in the record. Runs of equal outcomes
are therefore preserved: after an accepted draft, another acceptance is more likely.

Drafts after a rejected draft are wasted. Their number affects only the time of the step.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Outcome(IntEnum):
    """Outcome of the draft for one position in a request."""

    UNKNOWN = 0
    ACCEPTED = 1
    REJECTED = 2
    MISSING = 3
    """A draft was allowed, and the worker proposed none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Model of draft acceptance, learned from a record."""

    following: tuple[tuple[float, float, float], ...]
    """By previous outcome (`UNKNOWN` if there is none): probability of an accepted, a rejected and a missing draft."""
    wasted_share: float
    """Drafts verified after rejected ones, divided by the number that the limits allowed there."""
    positions: int
    """Number of known outcomes from which the model was learned."""

    def draw(self, before: int, rng: random.Random) -> int:
        """Draw an outcome, given the previous outcome of the same request."""
        accepted, rejected, _ = self.following[before]
        share = rng.random()
        if share < accepted:
            return Outcome.ACCEPTED
        return Outcome.REJECTED if share < accepted + rejected else Outcome.MISSING


class History:
    """Draft outcomes of one request in a record."""

    def __init__(self) -> None:
        self.outcomes = bytearray()
        """Outcome for each generated token, by index."""
        self.num_wasted = self.num_wasted_allowed = 0
        """Number of drafts verified after rejected ones, and the number allowed there."""

    def note(self, index: int, most: int, verified: int, accepted: int) -> None:
        """Note the drafts of one step.

        Args:
            index: index of the step's first token among the request's generated tokens, for which the first draft was
                proposed.
            most: number of drafts that the plan allowed.
            verified: number of drafts that the worker verified.
            accepted: number of verified drafts that were accepted.
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
    """Learn the acceptance from all requests' histories; return None if no plan allowed a draft."""
    # Start counts at 1, so that outcomes without a recorded successor also have probabilities.
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
    """Decides how many drafts are verified and accepted in a simulation."""

    def __init__(self, acceptance: Acceptance, known: Sequence[bytes], rng: random.Random) -> None:
        """Begin a simulation.

        Args:
            acceptance: model for the outcomes that are not known.
            known: known outcomes of each request, by index among its generated tokens.
            rng: random generator for the outcomes that are not known.
        """
        self._acceptance = acceptance
        self._known = known
        self._rng = rng
        self._last = bytearray(len(known))
        """Last outcome of each request."""

    def verify(self, request: int, index: int, most: int) -> tuple[int, int]:
        """Return how many drafts a request has verified in a step, and how many of these are accepted.

        Args:
            request: number of the request.
            index: index of the step's first token among its generated tokens.
            most: number of drafts that the plan allows.
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
