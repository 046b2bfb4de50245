"""Tools, and questions that one call of a tool answers.

A `Tool` has a name, a description and parameters. An `Errand` is a question with the tool that answers it, the
arguments of the call, the tool's result and the sentence that answers the question. Tools, parameters and values are
drawn from large sets, so the model must read the definition of a tool instead of knowing it. An argument stands in the
question word for word, and the answer repeats the result.

A topic ("price"), a place and a name are held out by hash, as are the operands of arithmetic. An errand for measuring
has a held-out topic and a held-out value where it has any.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tools.demo_model import stories, words
from tools.demo_model.problems import ATTRIBUTES, Problem, draw_facts
from tools.demo_model.split import is_held_out

Value: TypeAlias = str | int

MOST_DESCRIPTION = 100
"""Characters of a description that the chat template shows."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` are pairs of a name and a JSON type."""

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]

    @property
    def line(self) -> str:
        """The tool as the chat template shows it."""
        signature = f"{self.name}({','.join(f'{name}:{kind}' for name, kind in self.parameters)})"
        return f"{self.description} -> {signature}" if self.description else signature

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's API."""
        schema = {
            "type": "object",
            "properties": {name: _schema(kind) for name, kind in self.parameters},
            "required": [name for name, _ in self.parameters],
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


@dataclass(frozen=True, slots=True)
class Errand:
    """A question that one call of `tool` answers.

    `subject` says what the question is about; two tools of one subject compete. `held_out` says whether the errand is
    reserved for measuring. `tool_seed` determines the tool.
    """

    tool: Tool
    subject: str
    question: str
    arguments: tuple[tuple[str, Value], ...]
    result: str
    answer: str
    held_out: bool
    tool_seed: int = 0

    def call(self, *, compact: bool = False, key: str = "arguments") -> str:
        """Return the call as JSON."""
        separators = (",", ":") if compact else (", ", ": ")
        return json.dumps(
            {"name": self.tool.name, key: dict(self.arguments)}, ensure_ascii=False, separators=separators
        )


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
    kinds = (_weather, _time, _arithmetic, _calculator, _search, _topic, _own_topic, _fact, _action)
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
    sets = (frozenset((_CALCULATOR, each.word)) for each in _OPERATORS)
    found = [each for each in (frozenset(("time", "current time")), *sets) if subject in each]
    return frozenset((subject,)).union(*found)


def answer_to(result: Any, otherwise: str) -> str:
    """Return the answer that tells the result of a tool; `otherwise` is the answer to a plain value.

    A sentence is repeated. The members of an object are listed.
    """
    if isinstance(result, Mapping):
        parts = [f"the {key} is {value}" for key, value in result.items()]
        listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
        return f"T{listed[1:]}."
    return str(result) if str(result)[-1:] in (".", "!", "?") else otherwise


_CALCULATOR = "calculator"
_HELD_OUT_NAMES = frozenset(words.HELD_OUT_NAMES)


def _spoken_words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in text).split())


def _schema(kind: str) -> dict[str, Any]:
    return {"type": "string", "enum": kind.split("|")} if "|" in kind else {"type": kind}


def _split(values: tuple[str, ...], family: str) -> dict[bool, tuple[str, ...]]:
    """Return the training side (False) and the held-out side (True) of `values`."""
    return {side: tuple(each for each in values if is_held_out(family, each) == side) for side in (False, True)}


_CITIES = _split(words.CITIES, "city")
_COUNTRIES = _split(words.COUNTRIES, "country")
_TOPICS = _split(words.TOPICS, "topic")
_NOUN_TOPICS = _split(words.NOUNS, "topic")
_NAMES = {False: words.TRAINING_NAMES, True: words.HELD_OUT_NAMES}


def _invented(rng: random.Random) -> str:
    """Return a word of random letters, so that arguments are copied letter by letter where need be."""
    syllables = ("".join((rng.choice("bcdfghjklmnprstvwz"), rng.choice("aeiouy"))) for _ in range(rng.randint(1, 3)))
    return rng.choice(("", "a", "e", "o", "u", "st", "ch", "br")) + "".join(syllables) + rng.choice(("", "n", "r", "x"))


def _place(rng: random.Random, held_out: bool) -> str:
    chance = rng.random()
    if held_out or chance < 0.5:
        city = rng.choice(_CITIES[held_out])
        if held_out or chance < 0.44:
            return city
        return f"{city}, {rng.choice((*_COUNTRIES[False], *words.STATES))}"
    if chance < 0.6:
        return rng.choice(words.TOWNS)
    if chance < 0.66:
        return rng.choice((_invented(rng), rng.choice(_CITIES[False]).lower()))
    name = _invented(rng).title()
    if chance < 0.8:
        return name
    if chance < 0.9:
        return rng.choice(("San ", "New ", "Los ", "Port ", "El ", "Rio de ")) + name
    return f"{name} {rng.choice(('City', 'Town', 'Bay', 'Springs', 'Beach', _invented(rng).title()))}"


def _thing(rng: random.Random, _held_out: bool) -> str:
    noun = rng.choice(words.NOUNS) if rng.random() < 0.8 else _invented(rng)
    return noun if rng.random() < 0.5 else f"{rng.choice(words.ADJECTIVES)} {noun}"


def _code(rng: random.Random, _held_out: bool) -> str:
    letters = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(1, 4)))
    return rng.choice((letters, f"{letters}-{rng.randrange(10_000)}", f"{letters}{rng.randrange(1_000)}"))


def _number(rng: random.Random, _held_out: bool = False) -> int:
    return rng.randrange(10 ** rng.randint(1, 5))


@dataclass(frozen=True, slots=True)
class _Entity:
    """What a question is about: the names of a parameter for it, its noun, the preposition, and how to draw one."""

    parameters: tuple[str, ...]
    nouns: tuple[str, ...]
    prepositions: tuple[str, ...]
    kind: str
    draw: Callable[[random.Random, bool], Value]


_CITY = _Entity(
    ("city", "location", "place", "town", "city_name", "destination"),
    ("city", "location", "place", "town"),
    ("in", "in", "in", "for", "of"),
    "string",
    _place,
)
_PERSON = _Entity(
    ("name", "person", "user", "username", "customer", "who", "user_name"),
    ("person", "user", "customer", "name"),
    ("of", "of", "for"),
    "string",
    lambda rng, held_out: rng.choice(_NAMES[held_out]),
)
_ENTITIES = (
    _CITY,
    _PERSON,
    _Entity(
        ("item", "product", "thing", "name", "key", "word"),
        ("item", "product", "thing", "word"),
        ("of the", "of a", "for the", "of"),
        "string",
        _thing,
    ),
    _Entity(
        ("country", "country_name", "nation"),
        ("country",),
        ("of", "in"),
        "string",
        lambda rng, held_out: rng.choice(_COUNTRIES[held_out]),
    ),
    _Entity(
        ("id", "order_id", "ticket", "number", "account_id", "user_id"),
        ("order", "ticket", "account", "id"),
        ("of", "for", "of number", "of order", "for user"),
        "integer",
        _number,
    ),
    _Entity(("symbol", "code", "ticker", "flight", "id"), ("symbol", "code", "id"), ("of", "for"), "string", _code),
)


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


def _value(rng: random.Random) -> Value:
    kind = rng.randrange(9)
    if kind < 2:
        return _number(rng)
    if kind == 2:
        return f"{rng.randrange(100)}.{rng.randrange(10)}"
    if kind == 3:
        unit = rng.choice(("degrees", "km", "dollars", "euros", "minutes", "percent", "points", "million"))
        return f"{_number(rng)} {unit}"
    if kind == 4:
        return rng.choice(words.WEATHERS)
    if kind == 5:
        return rng.choice(words.TRAINING_NAMES)
    if kind == 6:
        return _code(rng, False)
    return _thing(rng, False)


def _told(rng: random.Random, topic: str, place: str, value: Value, own: Mapping[str, Value]) -> tuple[str, str]:
    """Return the result of a tool that finds `value`, and the answer; `place` says whose ("in Oslo", or nothing)."""
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
                f"The {subject} is {value} and the {rng.choice(words.TOPICS)} is {_value(rng)}.",
                stories.remark(rng),
            )
        )
        return sentence, sentence
    key = rng.choice((topic.replace(" ", "_"), topic.replace(" ", "_"), "result", "value", "answer"))
    members: dict[str, Value] = dict(own) if rng.random() < 0.4 else {}
    members[key] = value
    while len(members) < 4 and rng.random() < 0.5:
        members.setdefault(rng.choice(words.TOPICS).replace(" ", "_"), _value(rng))
    separators = (",", ":") if rng.random() < 0.5 else (", ", ": ")
    return json.dumps(members, ensure_ascii=False, separators=separators), answer_to(members, plain)


def _about(
    tool_rng: random.Random,
    rng: random.Random,
    topic: str,
    entity: _Entity,
    asked: tuple[str, ...],
    value: Value,
    held_out: bool,
) -> Errand:
    """Return an errand that asks for the topic of an entity; `asked` are forms of the question."""
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
    return _about(tool_rng, rng, topic, _CITY, _WEATHER_ASKED, value, held_out)


def _time(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    topic = tool_rng.choice(("time", "time", "current time"))
    asked = ("What time is it {whose}?", "What is the {topic} {whose}?", "Tell me the {topic} {whose}.")
    clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    return _about(tool_rng, rng, topic, _CITY, asked, clock, held_out)


def _topic(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    topic = tool_rng.choice((_TOPICS if tool_rng.random() < 0.6 else _NOUN_TOPICS)[held_out])
    if tool_rng.random() < 0.2:
        topic = f"{tool_rng.choice(words.ADJECTIVES)} {topic}"
    return _about(tool_rng, rng, topic, tool_rng.choice(_ENTITIES), _ASKED, _value(rng), held_out)


def _own_topic(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    """Return an errand whose tool has no parameters."""
    topic = tool_rng.choice(_TOPICS[held_out] if held_out else (*_TOPICS[held_out], "time", "date"))
    mine = tool_rng.random() < 0.4
    name = tool_rng.choice(("get_user_{}", "my_{}")).format(topic.replace(" ", "_"))
    tool = Tool(name if mine else _function_name(tool_rng, topic), _described(tool_rng, topic), ())
    result, answer = _told(rng, topic, "", _value(rng), {})
    question = rng.choice(_ASKED).format(topic=topic, whose="").replace(" ?", "?").replace(" .", ".").strip()
    return Errand(tool, topic, question.replace("the", "my") if mine else question, (), result, answer, held_out)


def _fact(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    attribute = tool_rng.choice(ATTRIBUTES)
    fact = next(fact for fact in iter(lambda: draw_facts(rng, 1, held_out)[0], None) if fact.attribute == attribute)
    parameter, noun = tool_rng.choice(_PERSON.parameters), tool_rng.choice(_PERSON.nouns)
    name = _function_name(tool_rng, attribute, noun)
    tool = Tool(name, _described(tool_rng, attribute, noun), ((parameter, "string"),))
    result = rng.choice((fact.value, fact.value, fact.statement))
    return Errand(tool, fact.attribute, fact.question, ((parameter, fact.name),), result, fact.statement, fact.held_out)


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operation: its word and sign, names and descriptions of its tools, and commands that state it."""

    word: str
    sign: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    commands: tuple[str, ...]


_OPERATORS = (
    _Operator(
        "plus",
        "+",
        ("add", "add", "add", "sum", "plus", "add_numbers", "addition", "add_two_numbers", "sum_two"),
        ("Add two numbers.", "Add {a} and {b}.", "Adds two integers.", "Return the sum of two numbers.", "Addition."),
        ("Add {a} and {b}.", "What is the sum of {a} and {b}?"),
    ),
    _Operator(
        "minus",
        "-",
        ("subtract", "subtract", "minus", "difference", "subtract_numbers", "sub"),
        ("Subtract two numbers.", "Subtract {b} from {a}.", "Return the difference of two numbers.", "Subtraction."),
        ("What is the difference of {a} and {b}?",),
    ),
    _Operator(
        "times",
        "*",
        ("multiply", "multiply", "multiply", "product", "times", "mul", "multiply_numbers"),
        (
            "Multiply two numbers.",
            "Multiply {a} and {b}.",
            "Multiplies {a} by {b}.",
            "Return the product of two numbers.",
        ),
        ("Multiply {a} by {b}.", "Multiply {a} and {b}.", "What is {a} multiplied by {b}?"),
    ),
    _Operator(
        "divided by",
        "/",
        ("divide", "divide", "quotient", "div", "divide_numbers"),
        ("Divide two numbers.", "Divide {a} by {b}.", "Return the quotient of two numbers.", "Division."),
        ("Divide {a} by {b}.",),
    ),
)
_OPERANDS = (
    ("a", "b"),
    ("a", "b"),
    ("x", "y"),
    ("left", "right"),
    ("first", "second"),
    ("num1", "num2"),
    ("n", "m"),
    ("first_number", "second_number"),
    ("i", "j"),
)


def _operation(rng: random.Random, operator: _Operator) -> tuple[int, int, int, bool]:
    """Return two operands, the result, and whether this problem is held out."""
    largest = rng.choice((20, 99, 99, 999, 9_999))
    a, b = rng.randint(0, largest), rng.randint(0, largest)
    match operator.word:
        case "plus":
            return a, b, a + b, Problem(a, "plus", b).held_out
        case "minus":
            a, b = max(a, b), min(a, b)
            return a, b, a - b, Problem(a, "minus", b).held_out
        case "times":
            return a, b, a * b, is_held_out("product", min(a, b), max(a, b))
        case _:
            b = max(1, b % 100)
            return a * b, b, a, is_held_out("quotient", a * b, b)


def _worked_out(rng: random.Random, operator: _Operator, a: int, b: int, result: int) -> tuple[str, str, str]:
    """Return a question about an operation, the tool's result and the answer."""
    spoken = rng.choice((f"{a} {operator.word} {b}", f"{a} {operator.word} {b}", f"{a} {operator.sign} {b}"))
    form = rng.choice(("What is {}?", "What is {}?", "What's {}?", "Calculate {}.", "How much is {}?", "{}", "{}?"))
    question = form.format(spoken) if rng.random() < 0.7 else rng.choice(operator.commands).format(a=a, b=b)
    plain = f"{a} {operator.word} {b} is {result}."
    if rng.random() < 0.75:
        return question, str(result), plain
    members = {rng.choice(("result", "value", "answer", "output")): result}
    return question, json.dumps(members), answer_to(members, plain)


def _arithmetic(tool_rng: random.Random, rng: random.Random, _held_out: bool) -> Errand:
    operator = tool_rng.choice(_OPERATORS)
    a, b, number, held_out = _operation(rng, operator)
    question, result, answer = _worked_out(rng, operator, a, b, number)
    first, second = tool_rng.choice(_OPERANDS)
    kind = tool_rng.choice(("integer", "integer", "number"))
    description = tool_rng.choice((*operator.descriptions, "")).format(a=first, b=second)
    name = tool_rng.choice(operator.names)
    if tool_rng.random() < 0.05:
        description = f"{name}({first}: int, {second}: int) -> int"
    tool = Tool(name, description, ((first, kind), (second, kind)))
    return Errand(tool, operator.word, question, ((first, a), (second, b)), result, answer, held_out)


def _calculator(tool_rng: random.Random, rng: random.Random, _held_out: bool) -> Errand:
    operator = rng.choice(_OPERATORS)
    a, b, number, held_out = _operation(rng, operator)
    question, result, answer = _worked_out(rng, operator, a, b, number)
    parameter = tool_rng.choice(("expression", "expression", "expr", "input", "formula"))
    description = tool_rng.choice(
        ("Evaluate a mathematical expression.", "Calculate an expression.", "A calculator.", "Useful for math.")
    )
    name = tool_rng.choice(("calculator", "calculate", "calc", "evaluate", "math", "eval_expression"))
    tool = Tool(name, description, ((parameter, "string"),))
    expression = f"{a} {operator.sign} {b}"
    return Errand(tool, _CALCULATOR, question, ((parameter, expression),), result, answer, held_out)


def _search(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    about = rng.choice((*_TOPICS[held_out], *_NOUN_TOPICS[held_out]))
    entity = rng.choice(_ENTITIES)
    phrase = rng.choice(
        (
            f"{about} {rng.choice(entity.prepositions)} {entity.draw(rng, held_out)}",
            f"{rng.choice(words.ADJECTIVES)} {about}",
            f"{about}",
            f"{entity.draw(rng, held_out)}",
            f"{_invented(rng)} {about}",
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
    value = _value(rng)
    result = rng.choice((stories.remark(rng), f"The {phrase} is {value}.", str(value)))
    answer = answer_to(result, f"The answer is {value}.")
    return Errand(tool, "search", form.format(phrase), ((parameter, phrase),), result, answer, held_out)


@dataclass(frozen=True, slots=True)
class _Action:
    """Something to do: names and a description of its tool, the command with its slots, the parameters of the slots."""

    names: tuple[str, ...]
    description: str
    command: str
    parameters: tuple[tuple[tuple[str, ...], str, Callable[[random.Random, bool], Value]], ...]
    done: str


def _language(rng: random.Random, _held_out: bool) -> str:
    return rng.choice(words.LANGUAGES)


def _file(rng: random.Random, _held_out: bool) -> str:
    return f"{_invented(rng)}.{rng.choice(('txt', 'md', 'py'))}"


_ACTIONS = (
    _Action(
        ("set_timer", "start_timer", "timer"),
        "Set a timer.",
        "Set a timer for {} minutes.",
        ((("minutes", "duration"), "integer", _number),),
        "The timer is set.",
    ),
    _Action(
        ("convert", "convert_currency", "exchange"),
        "Convert an amount from one currency to another.",
        "Convert {} {} to {}.",
        (
            (("amount", "value"), "integer", _number),
            (("from_currency", "source", "from"), "string", _code),
            (("to_currency", "target", "to"), "string", _code),
        ),
        "The amount was converted.",
    ),
    _Action(
        ("roll_dice", "roll_die", "roll"),
        "Roll a die.",
        "Roll a die with {} sides.",
        ((("sides", "n", "faces"), "integer", _number),),
        "The die shows a number.",
    ),
    _Action(
        ("roll_dice", "roll_die", "roll"), "Roll a six-sided die and return the result.", "Roll a die.", (), "Rolled."
    ),
    _Action(
        ("translate", "translate_text"),
        "Translate a text to another language.",
        "Translate {} to {}.",
        ((("text", "word"), "string", _thing), (("language", "target_language", "to"), "string", _language)),
        "The text was translated.",
    ),
    _Action(
        ("send_message", "send_email", "notify", "message"),
        "Send a message to a person.",
        "Send a message to {}.",
        ((("to", "recipient", "name"), "string", _PERSON.draw),),
        "The message was sent.",
    ),
    _Action(
        ("book_table", "reserve_table", "book"),
        "Book a table in a restaurant.",
        "Book a table in {} for {} people.",
        ((("city", "location", "place"), "string", _place), (("people", "guests", "party_size"), "integer", _number)),
        "The table is booked.",
    ),
    _Action(
        ("get_distance", "distance", "route"),
        "Get the distance between two places.",
        "How far is it from {} to {}?",
        ((("origin", "start", "from_city"), "string", _place), (("destination", "end", "to_city"), "string", _place)),
        "It is not far.",
    ),
    _Action(
        ("turn_on", "switch_on", "turn_on_device"),
        "Turn on a device.",
        "Turn on the {}.",
        ((("device", "name", "entity"), "string", _thing),),
        "It is on.",
    ),
    _Action(
        ("add_item", "add_to_list", "create_todo", "add_todo"),
        "Add an item to the list.",
        "Add {} to my list.",
        ((("item", "title", "text", "task"), "string", _thing),),
        "The item was added.",
    ),
    _Action(
        ("greet", "say_hello", "hello"),
        "Greet a person by name.",
        "Greet {}.",
        ((("name", "person", "who"), "string", _PERSON.draw),),
        "Hello!",
    ),
    _Action(
        ("reverse", "reverse_string", "reverse_text"),
        "Reverse a word.",
        "Reverse the word {}.",
        ((("text", "word", "s"), "string", _thing),),
        "The word was reversed.",
    ),
    _Action(
        ("read_file", "open_file", "cat"),
        "Read a file.",
        "Read the file {}.",
        ((("path", "file", "filename"), "string", _file),),
        "The file is empty.",
    ),
)


def _action(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    action = tool_rng.choice(_ACTIONS)
    chosen = [(tool_rng.choice(names), kind, draw(rng, held_out)) for names, kind, draw in action.parameters]
    tool = Tool(
        tool_rng.choice(action.names),
        action.description if tool_rng.random() < 0.9 else "",
        tuple((name, kind) for name, kind, _ in chosen),
    )
    question = action.command.format(*(value for _, _, value in chosen))
    question = question if rng.random() < 0.7 else f"Please {question[0].lower()}{question[1:]}"
    value = _value(rng)
    result = rng.choice((action.done, action.done, str(value), "ok", "done", stories.remark(rng)))
    answer = answer_to(result, f"The result is {result}.")
    arguments = tuple((name, value) for name, _, value in chosen)
    return Errand(tool, action.description, question, arguments, result, answer, held_out)


NO_TOOL = "I have no tool for that."
"""The answer to a question that needs a tool which is not offered."""


def unanswerable(rng: random.Random, subjects: set[str]) -> str:
    """Return a question that needs a tool for something outside of `subjects`."""
    known = {"plus", "minus", "search", *ATTRIBUTES}
    while True:
        errand = draw_errand(rng)
        if competing(errand.subject).isdisjoint(known | subjects):
            return errand.question
