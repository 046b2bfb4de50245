"""Short stories from a template grammar in which characters, things and events stay coherent.

A story chooses its cast once (a hero, a friend, a treasure, a place, ...) and then follows one plot: an ordered list of
beats, each with several wordings for the same cast. Early details (the red kite, the friend's name) return later, so a
reader of a served story sees at once whether attention works.

A cast is held out by the hash of (hero, treasure, place, plot). Stories for measurement use held-out casts only.
"""

import random
from dataclasses import dataclass
from typing import TypeAlias

from tools.demo_model import words
from tools.demo_model.split import is_held_out

Beat: TypeAlias = tuple[str, ...]
Plot: TypeAlias = tuple[Beat, ...]

_OPENING: Beat = (
    "Once upon a time there was a {trait} {kind} named {hero} who lived {place}.",
    "There once was a {trait} {kind} called {hero}. {He} lived {place}.",
    "A {trait} {kind} named {hero} lived {place}.",
    "Long ago, {place}, there lived a {trait} {kind} named {hero}.",
)
_FRIEND: Beat = (
    "{His} best friend was a {kind2} named {friend}.",
    "Every day {he} played with a {kind2} called {friend}.",
    "Next door lived a {kind2} named {friend}, and the two were good friends.",
)
_ENDING: Beat = (
    "From that day on, {hero} and {friend} were never apart.",
    "That night {hero} slept well and dreamed of the {treasure}.",
    "They laughed all the way home, and everyone was happy.",
    "And whenever it rained, {hero} and {friend} told this story again.",
    "{hero} smiled, because it had been a very good day.",
    "The {kind} and the {kind2} stayed friends for ever.",
)

PLOTS: dict[str, Plot] = {
    "lost": (
        _OPENING,
        (
            "{He} had a {treasure}, and {he} loved it more than anything.",
            "The thing {he} loved most was a {treasure}.",
            "{His} grandmother had given {him} a {treasure}.",
        ),
        _FRIEND,
        (
            "One morning the {treasure} was gone.",
            "One day {hero} woke up and could not find the {treasure}.",
            "But one windy day the {treasure} was lost.",
        ),
        (
            "{hero} looked {spot}, but it was not there.",
            "First {hero} searched {spot}. There was nothing.",
            "{He} looked everywhere, even {spot}, and began to cry.",
        ),
        (
            '"Do not be sad," said {friend}. "I will help you find it."',
            '"I can help you," said {friend}. "Two can see more than one."',
            '{friend} came at once. "Let us look for the {treasure} together," said the {kind2}.',
        ),
        (
            "They walked a long way, and at last {friend} saw the {treasure} {spot2}.",
            "The friends looked {spot2}, and there was the {treasure}!",
            "Just before dark they found the {treasure} {spot2}.",
        ),
        (
            '"Thank you," said {hero}. "You are a true friend."',
            "{hero} hugged {friend} and gave {him2} some {food}.",
            '"Now we can both play with it," said {hero}.',
        ),
        _ENDING,
    ),
    "found": (
        _OPENING,
        (
            "One day {hero} went for a walk and found a {treasure} {spot}.",
            "While {he} was picking {food}, {hero} found a {treasure} {spot}.",
            "One morning {hero} saw something {spot}. It was a {treasure}!",
        ),
        (
            '"How lovely," thought {hero}. "But it must belong to someone."',
            "{hero} wanted to keep the {treasure}, but {he} knew that it was not {his} own.",
            "{He} took the {treasure} and wondered who had lost it.",
        ),
        (
            "So {he} walked from door to door and asked everyone.",
            "So {he} carried it through the whole village.",
            "All day {hero} looked for the owner.",
        ),
        (
            "At last {he} met a {kind2} named {friend}, who looked very sad.",
            "In the evening {he} came to a {kind2} called {friend}, who sat by the road and cried.",
        ),
        (
            '"I have lost my {treasure}," said {friend}.',
            '"Have you seen a {treasure}?" asked {friend}.',
        ),
        (
            '"Here it is," said {hero}, and gave it back.',
            '{hero} held up the {treasure}. "Is this yours?"',
        ),
        (
            "{friend} was so happy that {he2} shared {his2} {food} with {hero}.",
            '"How can I thank you?" asked {friend}. "Be my friend," said {hero}.',
            "The {kind2} jumped for joy, and they ate {food} together.",
        ),
        _ENDING,
    ),
    "learn": (
        _OPENING,
        (
            "More than anything, {hero} wanted to {skill}.",
            "{hero} could do many things, but {he} could not {skill}.",
            "All the others could {skill}, but {hero} could not.",
        ),
        _FRIEND,
        (
            '"Please teach me to {skill}," {hero} said to {friend}.',
            'One day {he} asked {friend}, "Will you help me? I want to {skill}."',
        ),
        (
            '"It is not easy," said {friend}, "but we can try every day."',
            '"Of course," said the {kind2}. "We will begin tomorrow."',
        ),
        (
            "The first day it went badly, and everyone laughed.",
            "At first {hero} fell down again and again.",
            "The next day they tried and tried, but nothing worked.",
        ),
        (
            "But {hero} did not give up.",
            '"Try once more," said {friend}, and {hero} did.',
            "{hero} ate some {food}, took a deep breath and tried again.",
        ),
        (
            "After many days, {hero} could {skill} better than anyone.",
            "One sunny morning it worked! {hero} could {skill} at last.",
        ),
        (
            'As a gift, {friend} gave {him} a {treasure}. "You have earned it," {he2} said.',
            "All the animals came to see it, and {friend} brought a {treasure} as a prize.",
        ),
        _ENDING,
    ),
    "storm": (
        _OPENING,
        _FRIEND,
        (
            "One evening a great storm came over the land.",
            "One night the wind began to howl and the rain fell hard.",
            "In the middle of winter a terrible storm began.",
        ),
        (
            "{hero} sat at home with {his} {treasure} and listened to the thunder.",
            "{hero} was safe and warm, but {he} thought of {friend}.",
        ),
        (
            "Then there was a knock at the door. It was {friend}, wet and cold.",
            "Suddenly someone called for help. It was {friend}!",
        ),
        (
            '"My house is broken," said the {kind2}. "May I come in?"',
            '"The water has taken my house," said {friend}.',
        ),
        (
            '"Come in," said {hero}. "There is room for two."',
            "{hero} opened the door and made a fire.",
        ),
        (
            "They ate {food} and sat close to the fire until morning.",
            "{hero} gave {him2} warm {food} and a soft bed.",
        ),
        (
            "When the sun came out, they built a new house for {friend}.",
            "In the morning the storm was over, and {hero} helped {friend} to mend the house.",
        ),
        (
            "To say thank you, {friend} polished the {treasure} until it was like new.",
            '"I will never forget this," said {friend}, and looked at the {treasure} by the window.',
        ),
        _ENDING,
    ),
    "build": (
        _OPENING,
        _FRIEND,
        (
            'One day {hero} said, "Let us build a {build}!"',
            'It was a fine day in spring. "We should build a {build}," said {hero}.',
        ),
        (
            "{friend} brought wood and {hero} brought nails.",
            "They worked from morning to night and ate only {food}.",
            "The {kind} cut the wood, and the {kind2} held it.",
        ),
        (
            "But when they were nearly done, the {build} fell down.",
            "Soon the {build} was ready, but the wind broke it.",
        ),
        (
            '"It is your fault!" cried {hero}. {friend} said nothing and went away.',
            "{hero} was angry and shouted at {friend}, and the {kind2} ran home.",
        ),
        (
            "That night {hero} felt sorry. {He} took {his} {treasure} and went to {friend}.",
            "Soon {hero} was sorry. {He} wanted to give {friend} {his} own {treasure}.",
        ),
        (
            '"Forgive me," said {hero}. "The {treasure} is for you."',
            '"I was wrong," {he} said. "Please take this {treasure} and be my friend again."',
        ),
        (
            '"I am not angry," said {friend}. "Tomorrow we will build the {build} again."',
            "{friend} smiled. The next day they built the {build} again, and this time it was strong.",
        ),
        _ENDING,
    ),
    "home": (
        _OPENING,
        (
            "One day {hero} walked too far and lost {his} way.",
            "One afternoon {hero} went to look for {food} and forgot the time.",
        ),
        (
            "It grew dark, and {he} was all alone with {his} {treasure}.",
            "The sun went down. {He} had only a {treasure} with {him}.",
        ),
        (
            "{He} sat down {spot} and was afraid.",
            "{hero} hid {spot} and listened to the night.",
        ),
        (
            'Then a voice said, "Who is there?" It was a {kind2}.',
            "After a while a {kind2} came along the path.",
        ),
        (
            '"I am {friend}," said the {kind2}. "Are you lost?"',
            '"My name is {friend}," said the {kind2}. "Where do you live?"',
        ),
        (
            '"I live {place}," said {hero}, "but I can not find the way."',
            '"My home is {place}," said {hero}.',
        ),
        (
            '"I know the way," said {friend}. "Follow me."',
            '{friend} nodded. "It is not far. We will go together."',
        ),
        (
            "When they came home, {hero} gave {friend} the {treasure}.",
            "Soon they saw the light of the house, and {hero} thanked {friend} with the {treasure}.",
        ),
        _ENDING,
    ),
    "share": (
        _OPENING,
        (
            "{He} had a basket full of {food} and did not want to share.",
            "In autumn {he} had more {food} than anyone, but {he} kept it all.",
        ),
        (
            "One day a hungry {kind2} named {friend} came by.",
            "Then came a poor {kind2} called {friend}, who had not eaten for days.",
        ),
        (
            '"Please give me some {food}," said {friend}. "No," said {hero}.',
            '{friend} asked for some {food}, but {hero} said, "It is all mine."',
        ),
        (
            "That week {hero} lost {his} {treasure} in the river.",
            "The next day the {treasure} of {hero} fell into a deep well.",
        ),
        (
            "{He} could not get it back and cried.",
            "Nobody wanted to help {him}.",
        ),
        (
            "Only {friend} came. The {kind2} jumped in and brought back the {treasure}.",
            "But {friend} climbed down and came back with the {treasure}.",
        ),
        (
            '"Why did you help me?" asked {hero}. "Because you needed help," said {friend}.',
            '{hero} was ashamed. "I was not kind to you," {he} said.',
        ),
        (
            "Then {hero} shared all the {food} with {friend}.",
            "So {he} put the {food} on the table, and they ate together.",
        ),
        _ENDING,
    ),
}

_REMARKS = (
    "The wind was {w} over the {n}.",
    "Someone had left {a_w} {n} near the door.",
    "It was {a_w} day, and the {n} looked very {w2}.",
    "There stood {a_w} {n} between the {n2} and the road.",
    "The children saw {a_w} {n} and {a_w2} {n2}.",
    "Nobody knew why the {n} was so {w}.",
    "In the morning the {n} was {w} again.",
    "They talked about the {w} {n} for a long time.",
)


@dataclass(frozen=True, slots=True)
class Cast:
    """A story's characters and things; a request may ask for `kind` and `treasure`."""

    plot: str
    hero: str
    kind: str
    friend: str
    kind2: str
    trait: str
    place: str
    treasure: str
    spot: str
    spot2: str
    food: str
    skill: str
    build: str

    @property
    def held_out(self) -> bool:
        """Whether stories of this cast are held out to measure perplexity."""
        return is_held_out("story", self.kind, self.treasure, self.place, self.plot)


def draw_cast(rng: random.Random, held_out: bool = False) -> Cast:
    """Return a random cast on the given side of the split, with names from the training side."""
    while True:
        hero, friend = rng.sample(words.TRAINING_NAMES, 2)
        kind, kind2 = rng.sample(words.KINDS, 2)
        spot, spot2 = rng.sample(words.SPOTS, 2)
        cast = Cast(
            plot=rng.choice(tuple(PLOTS)),
            hero=hero,
            kind=kind,
            friend=friend,
            kind2=kind2,
            trait=rng.choice(words.TRAITS),
            place=rng.choice(words.PLACES),
            treasure=rng.choice(words.TREASURES),
            spot=spot,
            spot2=spot2,
            food=rng.choice(words.FOODS),
            skill=rng.choice(words.SKILLS),
            build=rng.choice(words.BUILDS),
        )
        if cast.held_out == held_out:
            return cast


def tell(rng: random.Random, cast: Cast) -> str:
    """Return one story about `cast`: a wording for each beat of its plot."""
    he, him, his = _pronouns(cast.kind)
    he2, him2, his2 = _pronouns(cast.kind2)
    slots = {
        **{field: getattr(cast, field) for field in Cast.__slots__},
        "he": he,
        "him": him,
        "his": his,
        "he2": he2,
        "him2": him2,
        "his2": his2,
        "He": he.capitalize(),
        "His": his.capitalize(),
    }
    return " ".join(rng.choice(beat).format_map(slots) for beat in PLOTS[cast.plot])


def request(rng: random.Random, cast: Cast) -> str:
    """Return a user's request for the story of `cast`."""
    a_kind = words.with_article(cast.kind)
    return rng.choice(
        (
            f"Tell me a story about {a_kind}.",
            f"Tell me a story about {a_kind}.",
            f"Write a short story about {a_kind}.",
            f"Can you tell me a story about {a_kind}?",
            f"Tell me a story about {a_kind} and {words.with_article(cast.treasure)}.",
            f"Tell me a story about {a_kind} named {cast.hero}.",
            "Tell me a story.",
        )
    )


def remark(rng: random.Random) -> str:
    """Return one unrelated sentence: filler between a fact and the question about it."""
    w, w2 = rng.sample(words.ADJECTIVES, 2)
    n, n2 = rng.sample(words.NOUNS, 2)
    return rng.choice(_REMARKS).format(w=w, w2=w2, a_w=words.with_article(w), a_w2=words.with_article(w2), n=n, n2=n2)


def _pronouns(kind: str) -> tuple[str, str, str]:
    if kind in words.WOMEN:
        return "she", "her", "her"
    if kind in words.MEN:
        return "he", "him", "his"
    return "it", "it", "its"
