"""Errands of arithmetic: for tools that add, subtract, multiply or divide, and for calculators.

Operands are held out as those of the problems without tools are.
"""

import json
import random
from dataclasses import dataclass

from tools.demo_model.errand import Errand, Tool, answer_to
from tools.demo_model.problems import Problem
from tools.demo_model.split import is_held_out

CALCULATOR = "calculator"
"""The subject of an errand for a calculator."""


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operation: its word and sign, names and descriptions for its tools, and commands that state it."""

    word: str
    sign: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    commands: tuple[str, ...]


OPERATORS = (
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


def draw_operation_errand(tool_rng: random.Random, rng: random.Random, _held_out: bool) -> Errand:
    operator = tool_rng.choice(OPERATORS)
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


def draw_calculator_errand(tool_rng: random.Random, rng: random.Random, _held_out: bool) -> Errand:
    """Return an errand for a tool that takes an expression."""
    operator = rng.choice(OPERATORS)
    a, b, number, held_out = _operation(rng, operator)
    question, result, answer = _worked_out(rng, operator, a, b, number)
    parameter = tool_rng.choice(("expression", "expression", "expr", "input", "formula"))
    description = tool_rng.choice(
        ("Evaluate a mathematical expression.", "Calculate an expression.", "A calculator.", "Useful for math.")
    )
    name = tool_rng.choice(("calculator", "calculate", "calc", "evaluate", "math", "eval_expression"))
    tool = Tool(name, description, ((parameter, "string"),))
    expression = f"{a} {operator.sign} {b}"
    return Errand(tool, CALCULATOR, question, ((parameter, expression),), result, answer, held_out)
