"""Arithmetic problems and facts: the two tasks with a right or wrong answer.

A hash decides whether each item is held out. Sums are split by the unordered pair, so that 17 + 25 does not reveal 25 +
17. A fact is held out if its name is, or if its (name, attribute, value) is. Held-out names never occur in the training
corpus.

All facts have the form `The ATTRIBUTE of NAME is VALUE.` The value is one of hundreds to thousands of equally likely
ones, so the model can answer only by attending to the place where the fact was stated.
"""

import random
from dataclasses import dataclass

from tools.demo_model import words
from tools.demo_model.split import is_held_out

LARGEST_OPERAND = 99
_OPERATOR_SIGNS = {"plus": "+", "minus": "-"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum, or a non-negative difference, with two numbers from 0 to 99; `operator` is "plus" or "minus"."""

    left: int
    operator: str
    right: int

    @property
    def answer(self) -> int:
        """The result."""
        return self.left + self.right if self.operator == "plus" else self.left - self.right

    @property
    def sign(self) -> str:
        """The operator as a sign."""
        return _OPERATOR_SIGNS[self.operator]

    @property
    def held_out(self) -> bool:
        if self.operator == "plus":
            return is_held_out("sum", min(self.left, self.right), max(self.left, self.right))
        return is_held_out("difference", self.left, self.right)

    @property
    def phrase(self) -> str:
        """The problem in words."""
        return f"{self.left} {self.operator} {self.right}"


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement that is true within one document only, such as `The secret word of Dorlan is amber`."""

    name: str
    attribute: str
    value: str

    @property
    def held_out(self) -> bool:
        return is_held_out("name", self.name) or is_held_out("fact", self.name, self.attribute, self.value)

    @property
    def subject(self) -> str:
        """The attribute with its name."""
        return f"{self.attribute} of {self.name}"

    @property
    def statement(self) -> str:
        """The sentence that states the fact."""
        return f"The {self.subject} is {self.value}."

    @property
    def question(self) -> str:
        """The question about the fact."""
        return f"What is the {self.subject}?"


def draw_problem(rng: random.Random, held_out: bool = False) -> Problem:
    """Return a random problem on the given side of the split; every fifth has small operands."""
    while True:
        largest = LARGEST_OPERAND if rng.random() < 0.8 else 20
        left, right = rng.randint(0, largest), rng.randint(0, largest)
        operator = rng.choice(("plus", "minus"))
        if operator == "minus" and left < right:
            left, right = right, left
        problem = Problem(left, operator, right)
        if problem.held_out == held_out:
            return problem


def draw_facts(rng: random.Random, count: int, held_out: bool = False) -> list[Fact]:
    """Return `count` facts on the given side of the split, with distinct (attribute, name) pairs.

    Names and attributes repeat among them, so that neither alone identifies the right fact.
    """
    names = rng.sample(words.HELD_OUT_NAMES if held_out else words.TRAINING_NAMES, max(1, count - count // 3))
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < count:
        name, attribute = rng.choice(names), rng.choice(ATTRIBUTES)
        fact = Fact(name, attribute, _draw_value(rng, attribute))
        if fact.held_out == held_out:
            facts.setdefault((name, attribute), fact)
    return list(facts.values())


ATTRIBUTES = ("secret word", "locker code", "ticket number", "home town", "best friend", "lost treasure")


def _draw_value(rng: random.Random, attribute: str) -> str:
    match attribute:
        case "secret word":
            return rng.choice(words.NOUNS)
        case "locker code":
            return f"{rng.randrange(10_000):04d}"
        case "ticket number":
            return f"{rng.randrange(1_000):03d}"
        case "home town":
            return rng.choice(words.TOWNS)
        case "best friend":
            return rng.choice(words.TRAINING_NAMES)
        case _:
            return f"{words.with_article(rng.choice(words.ADJECTIVES))} {rng.choice(words.NOUNS)}"
