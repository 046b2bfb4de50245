"""Arguments and results of tools, drawn from large sets: places, names, things, codes and numbers.

A place, a topic and a name are held out by hash.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model import words
from tools.demo_model.errand import Value
from tools.demo_model.split import is_held_out


def _split(values: tuple[str, ...], family: str) -> dict[bool, tuple[str, ...]]:
    """Return the training side (False) and the held-out side (True) of `values`."""
    return {side: tuple(each for each in values if is_held_out(family, each) == side) for side in (False, True)}


CITIES = _split(words.CITIES, "city")
COUNTRIES = _split(words.COUNTRIES, "country")
TOPICS = _split(words.TOPICS, "topic")
NOUN_TOPICS = _split(words.NOUNS, "topic")
NAMES = {False: words.TRAINING_NAMES, True: words.HELD_OUT_NAMES}


def draw_word(rng: random.Random) -> str:
    """Return a word of random letters, so that arguments are copied letter by letter where need be."""
    syllables = ("".join((rng.choice("bcdfghjklmnprstvwz"), rng.choice("aeiouy"))) for _ in range(rng.randint(1, 3)))
    return rng.choice(("", "a", "e", "o", "u", "st", "ch", "br")) + "".join(syllables) + rng.choice(("", "n", "r", "x"))


def draw_place(rng: random.Random, held_out: bool) -> str:
    chance = rng.random()
    if held_out or chance < 0.5:
        city = rng.choice(CITIES[held_out])
        if held_out or chance < 0.44:
            return city
        return f"{city}, {rng.choice((*COUNTRIES[False], *words.STATES))}"
    if chance < 0.6:
        return rng.choice(words.TOWNS)
    if chance < 0.66:
        return rng.choice((draw_word(rng), rng.choice(CITIES[False]).lower()))
    name = draw_word(rng).title()
    if chance < 0.8:
        return name
    if chance < 0.9:
        return rng.choice(("San ", "New ", "Los ", "Port ", "El ", "Rio de ")) + name
    return f"{name} {rng.choice(('City', 'Town', 'Bay', 'Springs', 'Beach', draw_word(rng).title()))}"


def draw_thing(rng: random.Random, _held_out: bool) -> str:
    noun = rng.choice(words.NOUNS) if rng.random() < 0.8 else draw_word(rng)
    return noun if rng.random() < 0.5 else f"{rng.choice(words.ADJECTIVES)} {noun}"


def draw_code(rng: random.Random, _held_out: bool) -> str:
    """Return a code of letters and digits."""
    letters = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(1, 4)))
    return rng.choice((letters, f"{letters}-{rng.randrange(10_000)}", f"{letters}{rng.randrange(1_000)}"))


def draw_number(rng: random.Random, _held_out: bool = False) -> int:
    """Return a number with one to five digits."""
    return rng.randrange(10 ** rng.randint(1, 5))


@dataclass(frozen=True, slots=True)
class Entity:
    """What a question is about: parameter names for it, its noun, the preposition, and how to generate one."""

    parameters: tuple[str, ...]
    nouns: tuple[str, ...]
    prepositions: tuple[str, ...]
    kind: str
    draw: Callable[[random.Random, bool], Value]


CITY = Entity(
    ("city", "location", "place", "town", "city_name", "destination"),
    ("city", "location", "place", "town"),
    ("in", "in", "in", "for", "of"),
    "string",
    draw_place,
)
PERSON = Entity(
    ("name", "person", "user", "username", "customer", "who", "user_name"),
    ("person", "user", "customer", "name"),
    ("of", "of", "for"),
    "string",
    lambda rng, held_out: rng.choice(NAMES[held_out]),
)
ENTITIES = (
    CITY,
    PERSON,
    Entity(
        ("item", "product", "thing", "name", "key", "word"),
        ("item", "product", "thing", "word"),
        ("of the", "of a", "for the", "of"),
        "string",
        draw_thing,
    ),
    Entity(
        ("country", "country_name", "nation"),
        ("country",),
        ("of", "in"),
        "string",
        lambda rng, held_out: rng.choice(COUNTRIES[held_out]),
    ),
    Entity(
        ("id", "order_id", "ticket", "number", "account_id", "user_id"),
        ("order", "ticket", "account", "id"),
        ("of", "for", "of number", "of order", "for user"),
        "integer",
        draw_number,
    ),
    Entity(("symbol", "code", "ticker", "flight", "id"), ("symbol", "code", "id"), ("of", "for"), "string", draw_code),
)


def draw_value(rng: random.Random) -> Value:
    """Return what a tool may find."""
    kind = rng.randrange(9)
    if kind < 2:
        return draw_number(rng)
    if kind == 2:
        return f"{rng.randrange(100)}.{rng.randrange(10)}"
    if kind == 3:
        unit = rng.choice(("degrees", "km", "dollars", "euros", "minutes", "percent", "points", "million"))
        return f"{draw_number(rng)} {unit}"
    if kind == 4:
        return rng.choice(words.WEATHERS)
    if kind == 5:
        return rng.choice(words.TRAINING_NAMES)
    if kind == 6:
        return draw_code(rng, False)
    return draw_thing(rng, False)
