"""Errands that command an action: set a timer, translate a word, send a message."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model import stories, words
from tools.demo_model.arguments import PERSON, draw_code, draw_number, draw_place, draw_thing, draw_value, draw_word
from tools.demo_model.errand import Errand, Tool, Value, answer_to


@dataclass(frozen=True, slots=True)
class _Action:
    """An action: names and a description for its tool, the command with its slots, the parameters for the slots."""

    names: tuple[str, ...]
    description: str
    command: str
    parameters: tuple[tuple[tuple[str, ...], str, Callable[[random.Random, bool], Value]], ...]
    done: str


def _language(rng: random.Random, _held_out: bool) -> str:
    return rng.choice(words.LANGUAGES)


def _file(rng: random.Random, _held_out: bool) -> str:
    return f"{draw_word(rng)}.{rng.choice(('txt', 'md', 'py'))}"


_ACTIONS = (
    _Action(
        ("set_timer", "start_timer", "timer"),
        "Set a timer.",
        "Set a timer for {} minutes.",
        ((("minutes", "duration"), "integer", draw_number),),
        "The timer is set.",
    ),
    _Action(
        ("convert", "convert_currency", "exchange"),
        "Convert an amount from one currency to another.",
        "Convert {} {} to {}.",
        (
            (("amount", "value"), "integer", draw_number),
            (("from_currency", "source", "from"), "string", draw_code),
            (("to_currency", "target", "to"), "string", draw_code),
        ),
        "The amount was converted.",
    ),
    _Action(
        ("roll_dice", "roll_die", "roll"),
        "Roll a die.",
        "Roll a die with {} sides.",
        ((("sides", "n", "faces"), "integer", draw_number),),
        "The die shows a number.",
    ),
    _Action(
        ("roll_dice", "roll_die", "roll"), "Roll a six-sided die and return the result.", "Roll a die.", (), "Rolled."
    ),
    _Action(
        ("translate", "translate_text"),
        "Translate a text to another language.",
        "Translate {} to {}.",
        ((("text", "word"), "string", draw_thing), (("language", "target_language", "to"), "string", _language)),
        "The text was translated.",
    ),
    _Action(
        ("send_message", "send_email", "notify", "message"),
        "Send a message to a person.",
        "Send a message to {}.",
        ((("to", "recipient", "name"), "string", PERSON.draw),),
        "The message was sent.",
    ),
    _Action(
        ("book_table", "reserve_table", "book"),
        "Book a table in a restaurant.",
        "Book a table in {} for {} people.",
        (
            (("city", "location", "place"), "string", draw_place),
            (("people", "guests", "party_size"), "integer", draw_number),
        ),
        "The table is booked.",
    ),
    _Action(
        ("get_distance", "distance", "route"),
        "Get the distance between two places.",
        "How far is it from {} to {}?",
        (
            (("origin", "start", "from_city"), "string", draw_place),
            (("destination", "end", "to_city"), "string", draw_place),
        ),
        "It is not far.",
    ),
    _Action(
        ("turn_on", "switch_on", "turn_on_device"),
        "Turn on a device.",
        "Turn on the {}.",
        ((("device", "name", "entity"), "string", draw_thing),),
        "It is on.",
    ),
    _Action(
        ("add_item", "add_to_list", "create_todo", "add_todo"),
        "Add an item to the list.",
        "Add {} to my list.",
        ((("item", "title", "text", "task"), "string", draw_thing),),
        "The item was added.",
    ),
    _Action(
        ("greet", "say_hello", "hello"),
        "Greet a person by name.",
        "Greet {}.",
        ((("name", "person", "who"), "string", PERSON.draw),),
        "Hello!",
    ),
    _Action(
        ("reverse", "reverse_string", "reverse_text"),
        "Reverse a word.",
        "Reverse the word {}.",
        ((("text", "word", "s"), "string", draw_thing),),
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


def draw_action_errand(tool_rng: random.Random, rng: random.Random, held_out: bool) -> Errand:
    """Return an errand for a tool that does something."""
    action = tool_rng.choice(_ACTIONS)
    chosen = [(tool_rng.choice(names), kind, draw(rng, held_out)) for names, kind, draw in action.parameters]
    tool = Tool(
        tool_rng.choice(action.names),
        action.description if tool_rng.random() < 0.9 else "",
        tuple((name, kind) for name, kind, _ in chosen),
    )
    question = action.command.format(*(value for _, _, value in chosen))
    question = question if rng.random() < 0.7 else f"Please {question[0].lower()}{question[1:]}"
    value = draw_value(rng)
    result = rng.choice((action.done, action.done, str(value), "ok", "done", stories.remark(rng)))
    answer = answer_to(result, f"The result is {result}.")
    arguments = tuple((name, value) for name, _, value in chosen)
    return Errand(tool, action.description, question, arguments, result, answer, held_out)
