"""Parsers of models' outputs: what each family writes is read, however the text is cut."""

# ruff: noqa: RUF001  (DeepSeek writes its markers with these characters)

import json
import random
from collections.abc import Callable, Iterable, Mapping
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.parsers import (
    FAMILIES,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    OutputParser,
    Reasoning,
    choose_family,
    merged,
)
from tests.examples import examples

SCHEMAS = {
    "f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}},
    "g": {"properties": {"s": {"type": "string"}}},
    "g.h": {},
    "look_up": {},
}
Calls = list[tuple[str, dict[str, object]]]


def read(family: str, text: str, cuts: Iterable[int] = (), *, reasons: bool = False) -> list[Event]:
    """Return the events of a text that arrives in pieces."""
    ids = count()
    parser = OutputParser(FAMILIES[family].read, schemas=SCHEMAS, reasons=reasons, new_id=lambda: f"call_{next(ids)}")
    events: list[Event] = []
    last = 0
    for cut in [*sorted(cuts), len(text)]:
        events += parser.push(text[last:cut])
        last = cut
    return merged(events + parser.finish())


def parts(events: list[Event]) -> tuple[str, str, Calls]:
    """Return the reasoning, the content, and the calls with parsed arguments."""
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    begun = [event for event in events if isinstance(event, CallBegun)]
    assert [event.index for event in begun] == list(range(len(begun)))
    assert [event.index for event in events if isinstance(event, CallEnded)] == list(range(len(begun)))
    arguments = [
        "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == each.index)
        for each in begun
    ]
    return reasoning, content, [(each.name, json.loads(text)) for each, text in zip(begun, arguments, strict=True)]


F: Calls = [("f", {"s": "x", "n": 1})]
FG: Calls = [("f", {"s": 'a "b" }] <', "n": 1}), ("g", {})]
WRITTEN: list[tuple[str, str, tuple[str, str, Calls]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "x", "n": 1}}\n</tool_call>', ("", "", F)),
    ("hermes", '<tool_call>{"arguments": {"s": "x", "n": 1}, "name": "f"}</tool_call>', ("", "", F)),
    (
        "hermes",
        "<think>\nwell\n</think>\n\nOne moment.\n<tool_call>\n"
        '{"name": "f", "arguments": {"s": "a \\"b\\" }] <", "n": 1}}\n</tool_call>\n<tool_call>\n'
        '{"name": "g", "arguments": {}}\n</tool_call>',
        ("well", "One moment.", FG),
    ),
    ("hermes", "<tool_call> no call </tool_call> after", ("", "<tool_call> no call </tool_call> after", [])),
    ("hermes", '<tool_call>{"city": 1}</tool_call>', ("", '<tool_call>{"city": 1}</tool_call>', [])),
    (
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n"
        "</function>\n</tool_call>",
        ("", "Sure.", F),
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=f>\n<parameter=s>\na "b" }] <\n</parameter>\n<parameter=n>1</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ("", "", FG),
    ),
    ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {"s": "x", "n": 1}}\n</tool_call>', ("", "", F)),
    ("llama3_json", '{"name": "f", "parameters": {"s": "x", "n": 1}}', ("", "", F)),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"s": "x", "n": 1}}', ("", "", F)),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"s": "a \\"b\\" }] <", "n": 1}}; {"name": "g", "parameters": {}}',
        ("", "", FG),
    ),
    ("llama3_json", 'It is {"name": "f"}.', ("", 'It is {"name": "f"}.', [])),
    ("llama3_json", '{"city": 1}', ("", '{"city": 1}', [])),
    ("llama3_json", '{"name": "Ann", "age": 3} ', ("", '{"name": "Ann", "age": 3} ', [])),
    ("pythonic", '[f(s="x", n=1)]', ("", "", F)),
    ("pythonic", "<|python_start|>[f(s='a \"b\" }] <', n=1), g()]<|python_end|>", ("", "", FG)),
    ("pythonic", '[g(s="a\\/b", t=[true, None]), f(s=null)]', ("", '[g(s="a\\/b", t=[true, None]), f(s=null)]', [])),
    (
        "pythonic",
        '[g(s="a\\/b", t=[true, null]), f(n=True)]',
        ("", "", [("g", {"s": "a/b", "t": [True, None]}), ("f", {"n": True})]),
    ),
    ("pythonic", '{"name": "f", "parameters": {"s": "x", "n": 1}}<|python_end|>', ("", "", F)),
    ("pythonic", '{"name": "Ann", "age": 3} ', ("", '{"name": "Ann", "age": 3} ', [])),
    ("pythonic", "[h(n=1)]", ("", "[h(n=1)]", [])),
    ("pythonic", "[f(n=1_0e999)]", ("", "[f(n=1_0e999)]", [])),
    ("pythonic", "[1, 2] are numbers", ("", "[1, 2] are numbers", [])),
    ("pythonic", "[f(x) for x in y]", ("", "[f(x) for x in y]", [])),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"s": "x", "n": 1}}]', ("", "", F)),
    ("mistral", 'Yes.[TOOL_CALLS]f[ARGS]{"s": "x", "n": 1}', ("", "Yes.", F)),
    (
        "mistral",
        '[THINK]well[/THINK][TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"s": "a \\"b\\" }] <", "n": 1}[TOOL_CALLS]g{}',
        ("well", "", FG),
    ),
    (
        "deepseek",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"s": "x", "n": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("", "Sure.", F),
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "a \\"b\\" }] <", "n": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "", FG),
    ),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>',
        ("", "", [("function", {"n": 1})]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"s": "x", "n": 1}<|call|>',
        ("well", "", F),
    ),
    (
        "harmony",
        ' to=functions.f<|channel|>commentary json<|message|>{"s": "x", "n": 1}<|call|>',
        ("", "", F),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ("well", "Yes.", []),
    ),
    (
        "glm4",
        "<think>well</think>\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>",
        ("well", "", F),
    ),
    (
        "glm4",
        '<tool_call>f<arg_key>s</arg_key><arg_value>a "b" }] <</arg_value><arg_key>n</arg_key><arg_value>1</arg_value>'
        "</tool_call><tool_call>g</tool_call>",
        ("", "", FG),
    ),
    ("glm4", '<tool_call>\n{"name": "f", "arguments": {"s": "x", "n": 1}}\n</tool_call>', ("", "", F)),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"s": "x", "n": 1}}]', ("", "", F)),
    ("gemma4", '<|tool_call>call:f{s:<|"|>x<|"|>,n:1}<tool_call|>', ("", "", F)),
    (
        "gemma4",
        '<|channel>thought\nwell<channel|>One moment.\n<|tool_call>call:f{s:<|"|>a "b" }] <<|"|>,n:1}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>",
        ("well", "One moment.", FG),
    ),
    (
        "gemma4",
        '<|tool_call>call:f{n:[1,{k:<|"|>a:b<|"|>,<|"|>l m<|"|>:None}, true ],s:{},t: -1.5 }<tool_call|>',
        ("", "", [("f", {"n": [1, {"k": "a:b", "l m": None}, True], "s": {}, "t": -1.5})]),
    ),
    ("gemma4", '<|tool_call>call:f{"s": "x", "n": 1}<tool_call|>', ("", "", F)),
    ("gemma4", "<|tool_call>call:f{s:x y,n:[1<tool_call|>Yes.", ("", "Yes.", [("f", {"s": "x y", "n": [1]})])),
    ("gemma4", "<|tool_call>call:f{s,n:}<tool_call|>", ("", "", [("f", {"s": None, "n": None})])),
    ("gemma4", "<|tool_call>f{} <|tool_call>call:f", ("", "<|tool_call>f{} <|tool_call>call:f", [])),
    ("gemma4", "<|channel>thought\n<channel|>Yes.", ("", "Yes.", [])),
    ("reasoning", "<think>well</think>Yes.", ("well", "Yes.", [])),
    ("plain", "<think>well</think>Yes.", ("", "<think>well</think>Yes.", [])),
]


@pytest.mark.parametrize(("family", "text", "expected"), WRITTEN)
def test_an_output_is_read_at_every_cut(family: str, text: str, expected: tuple[str, str, Calls]) -> None:
    """Reasoning, content and calls are found, and every cut into two gives the same events."""
    whole = read(family, text)

    assert parts(whole) == expected
    for cut in range(len(text)):
        assert read(family, text, [cut]) == whole
    assert read(family, text, range(len(text))) == whole


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", "well\n</think>\n\nYes.", ("well", "Yes.")),
        ("deepseek", "well</think>Yes.", ("well", "Yes.")),
        ("mistral", "well[/THINK]Yes.", ("well", "Yes.")),
        ("gemma4", "thought\nwell<channel|>Yes.", ("well", "Yes.")),
        ("hermes", "still thinking", ("still thinking", "")),
    ],
)
def test_an_output_may_begin_within_reasoning(family: str, text: str, expected: tuple[str, str]) -> None:
    """When the prompt ends with the opening marker, the output is reasoning up to the closing one."""
    for cut in range(len(text)):
        assert parts(read(family, text, [cut], reasons=True)) == (*expected, [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "x'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx"),
        ("llama3_json", '{"name": "f", "parameters": {"s": "x'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "x'),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x'),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "x'),
        ("glm4", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x"),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"s": "x'),
        ("gemma4", '<|tool_call>call:f{s:<|"|>x'),
    ],
)
def test_a_call_that_is_cut_off_keeps_its_arguments(family: str, text: str) -> None:
    """If the output ends within a call, the call has its name and the arguments so far, and no end event."""
    assert read(family, text) == [CallBegun(0, "call_0", "f"), CallArguments(0, '{"s": "x')]


@pytest.mark.parametrize(
    ("family", "text"), [("hermes", '<tool_call>{"name": "f"}</tool_call>'), ("llama3_json", '{"name": "f"}')]
)
def test_a_call_without_arguments_has_an_empty_object(family: str, text: str) -> None:
    """Clients parse the arguments of every complete call as JSON."""
    assert read(family, text) == [CallBegun(0, "call_0", "f"), CallArguments(0, "{}"), CallEnded(0)]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1 2", "{", ""])
def test_a_value_that_is_not_json_is_a_string(value: str) -> None:
    """Arguments stay valid JSON where the model writes a value that JSON does not have."""
    text = f"<tool_call>f<arg_key>n</arg_key><arg_value>{value}</arg_value></tool_call>"

    assert parts(read("glm4", text)) == ("", "", [("f", {"n": value})])


def test_a_name_with_half_a_surrogate_pair_can_be_sent() -> None:
    """A model may write any escape; a message can only carry characters."""
    begun = next(
        each
        for each in read("hermes", '<tool_call>{"name": "f\\ud83d", "arguments": {}}</tool_call>')
        if isinstance(each, CallBegun)
    )

    assert begun.name == "f\ufffd"


def test_only_the_first_arguments_of_a_call_count() -> None:
    """An object that has its arguments twice is one call with valid JSON."""
    text = '<tool_call>{"name": "f", "arguments": {"n": 1}, "arguments": {"n": 2}}</tool_call>'

    assert parts(read("hermes", text)) == ("", "", [("f", {"n": 1})])


def test_whitespace_is_searched_once() -> None:
    """Whitespace that may precede a marker is held back without being searched again with each piece."""
    parser = OutputParser(FAMILIES["hermes"].read)
    reader = parser._reader

    for _ in range(100):
        assert parser.push(" \n") == []
        assert reader.rest == ""

    assert merged(parser.push("a")) == [Content(" \n" * 100 + "a")]


def test_arguments_stream() -> None:
    """Arguments are passed on before the call is complete."""
    parser = OutputParser(FAMILIES["qwen3_coder"].read, schemas=SCHEMAS, new_id=lambda: "id")

    first = parser.push("<tool_call>\n<function=f>\n<parameter=s>\nSome long te")
    second = parser.push("xt\n</parameter>\n</function>\n</tool_call>")

    assert merged(first) == [CallBegun(0, "id", "f"), CallArguments(0, '{"s": "Some long te')]
    assert merged(second) == [CallArguments(0, 'xt"}'), CallEnded(0)]


PLAIN = st.text(st.sampled_from("ab <>{}[]/|:_\n\"'é(="), max_size=40)
VALUES = st.recursive(
    st.text(max_size=8) | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.text("abc_", min_size=1, max_size=4)
NAMED = st.lists(
    st.tuples(st.sampled_from(["f", "g.h", "look_up"]), st.dictionaries(KEYS, VALUES)), min_size=1, max_size=3
)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def _objects(calls: Calls, key: str) -> list[str]:
    return [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]


def _gemma(value: object) -> str:
    """Return a value as the vendor's chat template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{_gemma(key)}:{_gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


WRITERS: Mapping[str, Callable[[Calls], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls, "arguments")),
    "llama3_json": lambda calls: "; ".join(_objects(calls, "parameters")),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(_objects(calls, 'arguments'))}]",
    "granite": lambda calls: f"<|tool_call|>[{', '.join(_objects(calls, 'arguments'))}]",
    "gemma4": lambda calls: "".join(
        f"<|tool_call>call:{name}{{{','.join(f'{key}:{_gemma(each)}' for key, each in args.items())}}}<tool_call|>"
        for name, args in calls
    ),
    "pythonic": lambda calls: (
        "[" + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in calls) + "]"
    ),
    "deepseek": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(args)}<｜tool▁call▁end｜>" for name, args in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "harmony": lambda calls: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(args)}<|call|>"
        for name, args in calls
    ),
}


@given(family=st.sampled_from(sorted(WRITERS)), calls=NAMED, cuts=CUTS)
def test_calls_of_any_content_are_read(family: str, calls: Calls, cuts: list[int]) -> None:
    """An output in the family's format is read correctly, for all contents of the strings and for all cuts."""
    text = WRITERS[family](calls)

    assert parts(read(family, text, (cut for cut in cuts if cut < len(text)))) == ("", "", calls)


@given(family=st.sampled_from(sorted(FAMILIES)), text=PLAIN, cuts=CUTS)
def test_text_without_markers_is_content(family: str, text: str, cuts: list[int]) -> None:
    """Nothing is lost of an output that only looks as if it might call, and nothing is shown twice."""
    events = read(family, text, (cut for cut in cuts if cut < len(text)))

    assert "".join(event.text for event in events if isinstance(event, Content)) == text or any(
        isinstance(event, CallBegun) for event in events
    )


FRAGMENTS = [
    *"<>[]{}\":,\\ \n(='",
    *["a", "f", "name", "arguments", '{"name": "f", "arguments": {', "</think>", "<think>", "[THINK]", "[/THINK]"],
    *["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>", "</parameter>", "<arg_key>"],
    *["</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"],
    *[
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    *["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "assistant", "analysis", "to=functions.f"],
    *["<|tool_call|>", "<|python_start|>", "<|python_end|>", "```json", "function", "[f(", ")]"],
    *["<|channel>", "thought\n", "<channel|>", "<|tool_call>", "call:f{", 's:<|"|>', '<|"|>', "<tool_call|>"],
]


def _adversarial(rng: random.Random) -> str:
    """Return a random text with fragments from all families, often with the start or end of a real output."""
    real = rng.choice(WRITTEN)[1]
    head = real[: rng.randrange(len(real) + 1)] if rng.random() < 0.5 else ""
    tail = real[rng.randrange(len(real) + 1) :] if rng.random() < 0.3 else ""
    return head + "".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(14))) + tail


def _check_cuts(family: str, num_outputs: int, seed: int, *, every_cut: bool = False) -> None:
    rng = random.Random(seed)
    for _ in range(num_outputs):
        text, reasons = _adversarial(rng), rng.random() < 0.3
        whole = read(family, text, reasons=reasons)
        cuts = [[rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 8))] for _ in range(3)]
        in_two = [[cut] for cut in range(1, len(text))] if every_cut else []
        for chosen in (*cuts, *in_two, range(len(text))):
            assert read(family, text, chosen, reasons=reasons) == whole, (text, list(chosen), reasons)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_adversarial_outputs_are_read_alike_at_random_cuts(family: str) -> None:
    """Broken and nested markers give the same events however the text is cut."""
    _check_cuts(family, examples(100), seed=0)


@pytest.mark.release
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ten_thousand_outputs_are_read_alike(family: str, seed: int) -> None:
    """The same over 10,000 outputs of each family, with every cut in two and 30,000 random cuts."""
    _check_cuts(family, 2_000, seed, every_cut=True)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=x>{% endif %}", "qwen3_coder"),
        ("{% if tools %}<tool_call><arg_key>{% endif %}", "glm4"),
        ('{% if tools %}{"name": "f", "parameters": {}}{% endif %}', "llama3_json"),
        ("{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", "pythonic"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|start|>assistant<|channel|>final", "harmony"),
        ("<|tool_call|>", "granite"),
        ("{{ '<|tool_call>call:' + name }}<tool_call|><|channel>thought<channel|>", "gemma4"),
        ("{{ content.split('</think>')[-1] }}", "reasoning"),
        ("{{ messages }}", "plain"),
    ],
)
def test_the_template_tells_the_family(template: str, family: str) -> None:
    """The family is the one whose markers the chat template contains."""
    assert choose_family(template) == family
