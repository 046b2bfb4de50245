"""Errands for the corpus: questions that one tool call answers.

Tools, parameters and values come from large sets, so the model must read a tool's definition instead of knowing it. An
argument occurs in the question word for word, and the answer repeats the result.

An errand for measuring has a held-out topic or held-out operands, and a held-out value where it has any.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import replace

from tools.demo_model import stories, words
from tools.demo_model.actions import draw_action_errand
from tools.demo_model.arguments import CITY, ENTITIES, NOUN_TOPICS, PERSON, TOPICS, Entity, draw_value, draw_word
from tools.demo_model.calculations import CALCULATOR, OPERATORS, draw_calculator_errand, draw_operation_errand
from tools.demo_model.errand import Errand, Tool, Value, answer_to
from tools.demo_model.problems import ATTRIBUTES, draw_facts


def draw_errand(rng: random.Random, held_out: bool = False) -> Errand:
    """Return a random errand on the given side of the split."""
    while True:
        errand = _draw(rng, rng.getrandbits(32), held_out)
        if errand is not None:
            return errand


def draw_another(rng: random.Random, errand: Errand) -> Errand:
    """Return another errand for the same tool, on the same side of the split."""
    while True:
        another = _draw(rng, errand.tool_seed, errand.held_out)
        if another is not None:
            return another


def _draw(rng: random.Random, tool_seed: int, held_out: bool) -> Errand | None:
    """Return an errand; None if it is on the other side. The seed determines the tool, and `rng` everything else."""
    kinds = (
        _weather,
        _time,
        draw_operation_errand,
        draw_calculator_errand,
        _search,
        _topic,
        _own_topic,
        _fact,
        draw_action_errand,
    )
    shares = (4, 1.5, 7, 1.5, 2.5, 9, 1.2, 2, 3.5)
    tool_rng = random.Random(tool_seed)
    kind = tool_rng.choices(kinds, shares)[0]
    errand = replace(kind(tool_rng, rng, held_out), tool_seed=tool_seed)
    if errand.held_out != held_out:
        return None
    spoken = _spoken_words(f"{errand.question} {errand.result}")
    return errand if held_out or _HELD_OUT_NAMES.isdisjoint(spoken) else None


def competing(subject: str) -> frozenset[str]:
    """Return the subjects of tools that could serve `subject`."""
    sets = (frozenset((CALCULATOR, each.word)) for each in OPERATORS)
    found = [each for each in (frozenset(("time", "current time")), *sets) if subject in each]
    return frozenset((subject,)).union(*found)


_HELD_OUT_NAMES = frozenset(words.HELD_OUT_NAMES)


def _spoken_words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in text).split())


def _function_name(rng: random.Random, topic: str, noun: str = "") -> str:
    base = topic.replace(" ", "_")
    forms = ["get_{}", "get_{}", "get_{}", "get_{}", "{}", "fetch_{}", "lookup_{}", "look_up_{}", "find_{}"]
    forms += ["{}_lookup", "read_{}", "check_{}", "get_current_{}", "query_{}", "{}_tool"]
    if noun:
        forms += [f"get_{noun}_{{}}", f"{noun}_{{}}", "{}_of", f"{{}}_for_{noun}"]
    name = rng.choice(forms).format(base)
    if rng.random() < 0.15:
        first, *others = name.split("_")
        name = first + "".join(map(str.title, others))
    return name


def _described(rng: random.Random, topic: str, noun: str = "") -> str:
    some = ""
    if noun:
        some = f" {rng.choice(('in', 'of', 'for'))} {rng.choice(('a', 'a given', 'the given', 'the'))} {noun}"
    form = rng.choice(
        (
            "Get the {}{}.",
            "Get {}{}.",
            "Get the current {}{}.",
            "Return the {}{}.",
            "Returns the {}{}.",
            "Look up the {}{}.",
            "The {}{}.",
            "Find the {}{}.",
            "Get the {}{}",
            "Use this to find the {}{}.",
            "",
        )
    )
    return form.format(topic, some)


def _told(rng: random.Random, topic: str, place: str, value: Value, own: Mapping[str, Value]) -> tuple[str, str]:
    """Return a tool's result for `value`, and the answer; `place` is the location phrase ("in Oslo", or empty)."""
    subject = f"{topic} {place}".strip()
    plain = f"The {subject} is {value}."
    style = rng.random()
    if style < 0.45:
        return (json.dumps(value) if style < 0.03 else str(value)), plain
    if style < 0.7:
        sentence = rng.choice(
            (
                plain,
                f"It is {value} {place}.".replace(" .", "."),
                f"It's always {value} {place}!".replace(" !", "!"),
                f"{value} is the {topic}.",
                f"Today the {subject} is {value}.",
                f"The {subject} is {value} and the {rng.choice(words.TOPICS)} is {draw_value(rng)}.",
                stories.remark(rng),
            )
        )
        return sentence, sentence
    key = rng.choice((topic.replace(" ", "_"), topic.replace(" ", "_"), "result", "value", "answer"))
    members: dict[str, Value] = dict(own) if rng.random() < 0.4 else {}
    members[key] = value
    while len(members) < 4 and rng.random() < 0.5:
        members.setdefault(rng.choice(words.TOPICS).replace(" ", "_"), draw_value(rng))
    separators = (",", ":") if rng.random() < 0.5 else (", ", ": ")
    return json.dumps(members, ensure_ascii=False, separators=separators), answer_to(members, plain)


def _about(
    tool_rng: random.Random,
    rng: random.Random,
    topic: str,
    entity: Entity,
    asked: tuple[str, ...],
    value: Value,
    held_out: bool,
) -> Errand:
    """Return an errand that asks for an entity's topic; `asked` are forms of the question."""
    parameter, noun = tool_rng.choice(entity.parameters), tool_rng.choice(entity.nouns)
    whose = entity.draw(rng, held_out)
    preposition = rng.choice(entity.prepositions)
    parameters = [(parameter, entity.kind)]
    arguments: list[tuple[str, Value]] = [(parameter, whose)]
    if tool_rng.random() < 0.08:
        options = tool_rng.choice(("celsius|fahrenheit", "short|long", "metric|imperial", "en|de|fr"))
        parameters.append((tool_rng.choice(("unit", "units", "format", "style")), options))
        arguments.append((parameters[-1][0], options.split("|")[0]))
    tool = Tool(_function_name(tool_rng, topic, noun), _described(tool_rng, topic, noun), tuple(parameters))
    result, answer = _told(rng, topic, f"{preposition} {whose}", value, {parameter: whose})
    question = rng.choice(asked).format(topic=topic, whose=f"{preposition} {whose}")
    return Errand(tool, topic, question, tuple(arguments), result, answer, held_out)


_ASKED = (
    "What is the {topic} {whose}?",
    "What is the {topic} {whose}?",
    "What's the {topic} {whose}?",
    "what is the {topic} {whose}",
    "Tell me the {topic} {whose}.",
    "Get the {topic} {whose}.",
    "Look up the {topic} {whose}.",
    "Find the {topic} {whose}.",
    "Can you tell me the {topic} {whose}?",
    "I need the {topic} {whose}.",
    "Please find the {topic} {whose}.",
)
_WEATHER_ASKED = (
    *_ASKED[:5],
    "What is the {topic} like {whose}?",
    "What's the {topic} like {whose} today?",
    "How is the {topic} {whose}?",
    "What is the {topic} {whose} today?",
    "What is the {topic} {whose} right now?",
    "How is the {topic} {whose} today?",
)


def _weather(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    value = rng.choice((rng.choice(words.WEATHERS), f"{rng.choice(words.WEATHERS)}, {rng.randrange(40)} degrees"))
    value = value if rng.random() < 0.8 else str(rng.randrange(40))
    topic = tool_rng.choice(("weather", "weather", "temperature"))
    return _about(tool_rng, rng, topic, CITY, _WEATHER_ASKED, value, held_out)


def _time(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    topic = tool_rng.choice(("time", "time", "current time"))
    asked = ("What time is it {whose}?", "What is the {topic} {whose}?", "Tell me the {topic} {whose}.")
    clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    return _about(tool_rng, rng, topic, CITY, asked, clock, held_out)


def _topic(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    topic = tool_rng.choice((TOPICS if tool_rng.random() < 0.6 else NOUN_TOPICS)[held_out])
    if tool_rng.random() < 0.2:
        topic = f"{tool_rng.choice(words.ADJECTIVES)} {topic}"
    return _about(tool_rng, rng, topic, tool_rng.choice(ENTITIES), _ASKED, draw_value(rng), held_out)


def _own_topic(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    """Return an errand whose tool has no parameters."""
    topic = tool_rng.choice(TOPICS[held_out] if held_out else (*TOPICS[held_out], "time", "date"))
    mine = tool_rng.random() < 0.4
    name = tool_rng.choice(("get_user_{}", "my_{}")).format(topic.replace(" ", "_"))
    tool = Tool(name if mine else _function_name(tool_rng, topic), _described(tool_rng, topic), ())
    result, answer = _told(rng, topic, "", draw_value(rng), {})
    question = rng.choice(_ASKED).format(topic=topic, whose="").replace(" ?", "?").replace(" .", ".").strip()
    return Errand(tool, topic, question.replace("the", "my") if mine else question, (), result, answer, held_out)


def _fact(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    attribute = tool_rng.choice(ATTRIBUTES)
    fact = next(fact for fact in iter(lambda: draw_facts(rng, 1, held_out)[0], None) if fact.attribute == attribute)
    parameter, noun = tool_rng.choice(PERSON.parameters), tool_rng.choice(PERSON.nouns)
    name = _function_name(tool_rng, attribute, noun)
    tool = Tool(name, _described(tool_rng, attribute, noun), ((parameter, "string"),))
    result = rng.choice((fact.value, fact.value, fact.statement))
    return Errand(tool, fact.attribute, fact.question, ((parameter, fact.name),), result, fact.statement, fact.held_out)


def _search(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    about = rng.choice((*TOPICS[held_out], *NOUN_TOPICS[held_out]))
    entity = rng.choice(ENTITIES)
    phrase = rng.choice(
        (
            f"{about} {rng.choice(entity.prepositions)} {entity.draw(rng, held_out)}",
            f"{rng.choice(words.ADJECTIVES)} {about}",
            f"{about}",
            f"{entity.draw(rng, held_out)}",
            f"{draw_word(rng)} {about}",
        )
    )
    form = rng.choice(
        (
            "Search for {}.",
            "Search for {}.",
            "Search the web for {}.",
            "Look up {}.",
            "Find {}.",
            "What is the {}?",
            "Find information about {}.",
            "What do you know about {}?",
            "Who is {}?",
        )
    )
    parameter = tool_rng.choice(("query", "query", "query", "q", "text", "term", "topic", "search_query"))
    names = ["search", "search", "web_search", "look_up", "lookup", "search_docs", "wikipedia", "find"]
    name = tool_rng.choice([*names, "searchWeb", "google"])
    description = tool_rng.choice(
        (
            "Search the web.",
            "Search for information.",
            "Look up a topic.",
            "Search the documents.",
            "Call to surf the web.",
        )
    )
    tool = Tool(name, description if tool_rng.random() < 0.9 else "", ((parameter, "string"),))
    value = draw_value(rng)
    result = rng.choice((stories.remark(rng), f"The {phrase} is {value}.", str(value)))
    answer = answer_to(result, f"The answer is {value}.")
    return Errand(tool, "search", form.format(phrase), ((parameter, phrase),), result, answer, held_out)


NO_TOOL = "I have no tool for that."
"""The answer to a question that needs a tool which is not offered."""


def unanswerable(rng: random.Random, subjects: set[str]) -> str:
    """Return a question that needs a tool for something outside of `subjects`."""
    known = {"plus", "minus", "search", *ATTRIBUTES}
    while True:
        errand = draw_errand(rng)
        if competing(errand.subject).isdisjoint(known | subjects):
            return errand.question
