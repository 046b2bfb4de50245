"""Arithmetic problems and facts: the two things with an answer that is right or wrong.

Both know by hash whether they are held out. Sums are split by the unordered pair, so that 25 + 17 can not
give away 17 + 25. A fact is held out when its name is, or when its (name, attribute, value) is: held-out
names never occur in the training corpus, in any role.

A fact is worded in one way only, `The ATTRIBUTE of NAME is VALUE.`; its value comes from hundreds to
thousands of equally likely ones, so the only way to answer is to attend to where it was stated.
"""

import random
from dataclasses import dataclass

from tools.demo_model import words
from tools.demo_model.split import is_held_out

LARGEST_OPERAND = 99
_OPERATOR_SIGNS = {"plus": "+", "minus": "-"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum, or a difference that is not negative, of two numbers from 0 to 99; `operator` is "plus" or "minus"."""

    left: int
    operator: str
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right if self.operator == "plus" else self.left - self.right

    @property
    def sign(self) -> str:
        return _OPERATOR_SIGNS[self.operator]

    @property
    def held_out(self) -> bool:
        if self.operator == "plus":
            return is_held_out("sum", min(self.left, self.right), max(self.left, self.right))
        return is_held_out("difference", self.left, self.right)

    @property
    def phrase(self) -> str:
        return f"{self.left} {self.operator} {self.right}"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that is true within one document only: `The secret word of Dorlan is amber.`"""

    name: str
    attribute: str
    value: str

    @property
    def held_out(self) -> bool:
        return is_held_out("name", self.name) or is_held_out("fact", self.name, self.attribute, self.value)

    @property
    def subject(self) -> str:
        return f"{self.attribute} of {self.name}"

    @property
    def statement(self) -> str:
        return f"The {self.subject} is {self.value}."

    @property
    def question(self) -> str:
        return f"What is the {self.subject}?"


def draw_problem(rng: random.Random, held_out: bool = False) -> Problem:
    """A random problem on the wanted side of the split; every fifth has small operands."""
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
    """`count` facts on the wanted side of the split, no two about the same attribute of the same name.

    Names and attributes repeat among them, so that neither alone is enough to find the right fact.
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
