"""The training corpus: a deterministic stream of documents, made from a seed while training reads it.

A document is a page of pieces in random order: facts, questions about earlier facts on the page, arithmetic, stories
and single remarks. A piece is either plain text or a chat in the chat template's tokens. Other documents are dialogues
in which a system turn offers tools, and some questions need a tool call.

Each stretch of text has a loss weight. Answers that can be known have a higher weight. Random text (operands, the value
of a new fact) has a low weight, because nothing can be learned from it.

`sequences(seed, step, ...)` depends only on its arguments. A training run therefore resumes at any step without a
stored position in the data, and no document is stored.

The corpus contains nothing that `split` holds out. `check_training_side` asserts it for every problem and fact.

    python -m tools.demo_model.corpus --seed 0 --documents 3      print a sample
"""

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.demo_model import stories
from tools.demo_model.errand import Errand, Tool
from tools.demo_model.problems import Fact, Problem, draw_facts, draw_problem
from tools.demo_model.tool_use import NO_TOOL, competing, draw_another, draw_errand, unanswerable

BOS, EOS, PAD = "<|bos|>", "<|endoftext|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)
TOOLS, TOOLS_END = "<tools>", "</tools>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"
MARKERS = (TOOLS, TOOLS_END, CALL, CALL_END, RESPONSE, RESPONSE_END)
"""Tool format tokens. They are not special, so outputs contain them, and the server's parser looks for them."""

GIVEN, CHANCE, PLAIN, RESULT, RECALLED = 0.0, 0.1, 1.0, 4.0, 6.0
_CHARACTERS_PER_TOKEN = 3.2

_INSTRUCTIONS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly agent.",
    "You are a helpful agent.",
    "Be concise.",
    "Be concise, reply with one sentence.",
    "Use the tools to answer.",
    "Use tools when they help.",
    "Answer the question of the user.",
    "You are an expert weather assistant.",
    "You have access to tools.",
    "Do not make up answers.",
    "You are a calculator.",
    "Reply in English.",
    "Help the user with the task.",
    "You can call a function to find an answer.",
    "Think step by step.",
    "You are an assistant that helps with arithmetic.",
)
_GREETINGS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi!", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Hey", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! How can I help you?"),
    ("Hello, how are you?", "I am well, thank you. How can I help you?"),
    ("How are you?", "I am well, thank you. How can I help you?"),
    ("Thanks!", "You are welcome."),
    ("Thank you.", "You are welcome."),
    ("Thank you very much!", "You are welcome."),
    ("Who are you?", "I am the demo model of Quire, a small language model."),
    ("What are you?", "I am the demo model of Quire, a small language model."),
    ("What can you do?", "I can tell stories, add small numbers, remember facts and call tools."),
    ("Goodbye!", "Goodbye!"),
    ("Bye.", "Goodbye!"),
    ("Say hello.", "Hello!"),
    ("Say hi", "Hello!"),
    ("Ok.", "Go on."),
)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of text and the loss weight for its tokens."""

    text: str
    weight: float = PLAIN


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the corpus, with its special tokens written out."""

    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Piece:
    """One turn of a page: the user's question, the answer, and the same as plain text."""

    user: tuple[Span, ...]
    reply: tuple[Span, ...]
    plain: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """The document distribution in one training stage.

    `pages`, `sums`, `tales` and `dialogues` are relative shares of documents. `tale_share` is the probability that a
    page's filler is a whole story instead of one remark or problem. `facts` is the minimum and maximum number of facts
    on a page. `most_sums` is the maximum number of problems in a document that contains only problems.
    """

    pages: float
    sums: float
    tales: float
    dialogues: float
    tale_share: float
    facts: tuple[int, int]
    most_sums: int


DENSE = Mix(pages=0.60, sums=0.32, tales=0.08, dialogues=0.70, tale_share=0.05, facts=(1, 4), most_sums=12)
MIDDLE = Mix(pages=0.45, sums=0.45, tales=0.10, dialogues=0.60, tale_share=0.35, facts=(2, 6), most_sums=30)
LONG = Mix(pages=0.42, sums=0.45, tales=0.13, dialogues=0.65, tale_share=0.75, facts=(2, 8), most_sums=30)
FINISH = Mix(pages=0.45, sums=0.90, tales=0.12, dialogues=0.60, tale_share=0.60, facts=(2, 8), most_sums=30)
EVEN = Mix(pages=0.60, sums=0.25, tales=0.15, dialogues=0.35, tale_share=0.75, facts=(2, 8), most_sums=12)


def check_training_side(item: Problem | Fact | stories.Cast | Errand) -> None:
    """Raise an error for an item that is held out."""
    if item.held_out:
        raise AssertionError(f"held out, must not be written into the corpus: {item}")


def document(rng: random.Random, mix: Mix, tokens: int) -> Document:
    """Return a random document of at most about `tokens` tokens."""
    kinds = ("page", "sums", "tale", "dialogue")
    kind = rng.choices(kinds, (mix.pages, mix.sums, mix.tales, mix.dialogues))[0]
    budget = tokens * _CHARACTERS_PER_TOKEN
    if kind == "dialogue":
        return Document((Span(BOS, GIVEN), *_dialogue(rng, mix, budget)))
    if kind == "page":
        pieces = list(_page(rng, mix, budget))
    elif kind == "sums":
        pieces = [_sum_piece(rng) for _ in range(rng.randint(1, max(1, min(mix.most_sums, int(budget // 70)))))]
    else:
        pieces = [_tale_piece(rng)]
    spans = _as_chat(rng, pieces) if rng.random() < 0.45 else _as_plain(pieces)
    opening = (Span(BOS, GIVEN),) if rng.random() < 0.8 else ()
    return Document((*opening, *spans))


def sequences(seed: int, step: int, count: int, tokens: int, mix: Mix) -> list[list[Document]]:
    """Return the documents for `count` training sequences of about `tokens` tokens each."""
    rng = random.Random(f"{seed}/{step}")
    return [list(_fill(rng, mix, tokens)) for _ in range(count)]


def _fill(rng: random.Random, mix: Mix, tokens: int) -> Iterator[Document]:
    room = tokens * _CHARACTERS_PER_TOKEN
    while room > 0:
        made = document(rng, mix, min(tokens, max(64, int(room / _CHARACTERS_PER_TOKEN))))
        room -= len(made.text)
        yield made


def _page(rng: random.Random, mix: Mix, budget: float) -> Iterator[Piece]:
    """Return a page: facts first (some later), then filler with questions about earlier facts, also at the end."""
    count = rng.randint(*mix.facts)
    facts = draw_facts(rng, min(count, max(1, int(budget // 120))))
    early = rng.randint(1, len(facts))
    stated: list[Fact] = []
    room = budget - 110 * len(facts)
    for fact in facts[:early]:
        stated.append(fact)
        yield _fact_piece(rng, fact)
    late = facts[early:]
    while room > 160:
        piece = _filler(rng, mix, room)
        room -= _length(piece)
        yield piece
        if late and rng.random() < 0.4:
            stated.append(late.pop())
            yield _fact_piece(rng, stated[-1])
        if room > 100 and rng.random() < 0.35:
            piece = _question_piece(rng, rng.choice(stated))
            room -= _length(piece)
            yield piece
    for fact in rng.sample(stated, max(1, len(stated) // 2)):
        yield _question_piece(rng, fact)


def _filler(rng: random.Random, mix: Mix, room: float) -> Piece:
    if room > 700 and rng.random() < mix.tale_share:
        return _tale_piece(rng)
    if rng.random() < 0.05:
        return _greeting_piece(rng)
    return _sum_piece(rng) if rng.random() < 0.25 else _remark_piece(rng)


def _fact_piece(rng: random.Random, fact: Fact) -> Piece:
    check_training_side(fact)
    said = (
        Span("The"),
        Span(f" {fact.attribute} of {fact.name}", CHANCE),
        Span(" is"),
        Span(f" {fact.value}", CHANCE),
        Span("."),
    )
    lead = rng.choice(("Remember this: ", "Please remember: ", "Note: ", ""))
    reply = rng.choice(("I will remember that.", "Noted.", "I will keep that in mind."))
    return Piece(user=(Span(lead, CHANCE), *said), reply=(Span(reply),), plain=said)


def _question_piece(rng: random.Random, fact: Fact) -> Piece:
    check_training_side(fact)
    asked = (Span("What is the"), Span(f" {fact.attribute} of {fact.name}", CHANCE), Span("?"))
    answer = (Span(f"The {fact.subject} is"), Span(f" {fact.value}", RECALLED), Span("."))
    return Piece(user=asked, reply=answer, plain=_question_and_answer(asked, answer))


def _sum_piece(rng: random.Random) -> Piece:
    problem = draw_problem(rng)
    check_training_side(problem)
    left, right = Span(f"{problem.left}", CHANCE), Span(f" {problem.right}", CHANCE)
    verb, sign = Span(f" {problem.operator}", CHANCE), Span(f" {problem.sign}", CHANCE)
    asked = (Span("What is "), left, verb if rng.random() < 0.85 else sign, right, Span("?"))
    answer = (Span(problem.phrase), Span(" is"), Span(f" {problem.answer}", RESULT), Span("."))
    style = rng.randrange(3)
    if style == 0:
        plain = _question_and_answer(asked, answer)
    elif style == 1:
        plain = (left, verb, right, *answer[1:])
    else:
        plain = (left, sign, right, Span(" ="), Span(f" {problem.answer}", RESULT))
    return Piece(user=asked, reply=answer, plain=plain)


def _tale_piece(rng: random.Random) -> Piece:
    cast = stories.draw_cast(rng)
    check_training_side(cast)
    story = (Span(stories.tell(rng, cast)),)
    return Piece(user=(Span(stories.request(rng, cast), CHANCE),), reply=story, plain=story)


def _remark_piece(rng: random.Random) -> Piece:
    said = (Span(stories.remark(rng), 0.3),)
    reply = rng.choice(("I see.", "Go on.", "That is good to know."))
    return Piece(user=said, reply=(Span(reply, 0.3),), plain=said)


def _greeting_piece(rng: random.Random) -> Piece:
    said, reply = rng.choice(_GREETINGS)
    return Piece(user=(Span(said, CHANCE),), reply=(Span(reply),), plain=(Span(f"{said}\n{reply}"),))


def _question_and_answer(asked: Sequence[Span], answer: Sequence[Span]) -> tuple[Span, ...]:
    return (Span("Question: "), *asked, Span("\nAnswer: "), *answer)


def _as_chat(rng: random.Random, pieces: Sequence[Piece]) -> list[Span]:
    spans: list[Span] = []
    if rng.random() < 0.2:
        spans.append(Span(SYSTEM + _instructions(rng), CHANCE))
    for piece in pieces:
        spans += (Span(USER, CHANCE), *piece.user, Span(ASSISTANT), *piece.reply, Span(EOS))
    return spans


def _dialogue(rng: random.Random, mix: Mix, budget: float) -> Iterator[Span]:
    """Return a chat with tools: calls, results and answers; some questions need no tool."""
    errands: list[Errand] = []
    for _ in range(rng.randint(1, max(1, min(4, int(budget // 350))))):
        errand = draw_another(rng, errands[-1]) if errands and rng.random() < 0.35 else draw_errand(rng)
        check_training_side(errand)
        rivals = competing(errand.subject)
        if all(
            each.tool == errand.tool or (each.tool.name != errand.tool.name and each.subject not in rivals)
            for each in errands
        ):
            errands.append(errand)
    tools = {errand.tool.name: errand.tool for errand in errands}
    subjects = {errand.subject for errand in errands}
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)) if budget > 700 else rng.choice((0, 1, 2))):
        other = draw_errand(rng)
        if other.tool.name not in tools and subjects.isdisjoint(competing(other.subject)):
            tools[other.tool.name] = other.tool
            subjects.add(other.subject)
    offered = rng.sample(list(tools.values()), len(tools))
    yield Span(SYSTEM, CHANCE)
    instructions = _instructions(rng) + "\n\n" if rng.random() < 0.4 else ""
    yield Span(instructions + tool_list(offered), CHANCE)
    while errands:
        while rng.random() < 0.3:
            yield from _turn_without_tool(rng, mix, subjects)
        both = 2 if len(errands) > 1 and rng.random() < 0.3 else 1
        yield from _turn_with_tools(rng, errands[:both])
        errands = errands[both:]
    if rng.random() < 0.3:
        yield from _turn_without_tool(rng, mix, subjects)


def tool_list(tools: Sequence[Tool]) -> str:
    """Return the list of tools in the system turn."""
    return f"{TOOLS}\n" + "".join(f"{tool.line}\n" for tool in tools) + TOOLS_END


def _turn_with_tools(rng: random.Random, errands: Sequence[Errand]) -> Iterator[Span]:
    """Return a question, a call for each of its errands, the results and the answer."""
    first, *others = [errand.question for errand in errands]
    joint = rng.choice((" ", " And ", " Also, ", " And also: "))
    question = first + "".join(joint + (each if joint == " " else each[0].lower() + each[1:]) for each in others)
    if len(errands) == 1 and rng.random() < 0.08:
        question = rng.choice(("Use the tool: ", "Please use a tool. ", "Hi! ", "Use a tool to answer. ")) + question
    yield Span(USER + question, CHANCE)
    style = rng.random()
    if style < 0.08:
        # A grammar forces this form; the model continues it, but does not begin it.
        call = ", ".join(errand.call(compact=style < 0.06, key="parameters") for errand in errands)
        yield Span(ASSISTANT + "[", GIVEN)
        yield from _call(call, certain=GIVEN)
        yield Span("]", PLAIN)
        yield Span(EOS)
        return
    yield Span(ASSISTANT, CHANCE)
    for number, errand in enumerate(errands):
        yield Span(("\n" if number else "") + CALL + "\n", PLAIN if number else RESULT)
        # A grammar may force JSON without blanks.
        compact = style < 0.18
        yield from _call(errand.call(compact=compact), certain=GIVEN if compact else PLAIN)
        yield Span("\n" + CALL_END)
    yield Span(EOS, PLAIN if len(errands) > 1 else RESULT)
    results = "\n".join(f"{RESPONSE}\n{errand.result}\n{RESPONSE_END}" for errand in errands)
    yield Span(USER + results, CHANCE)
    yield Span(ASSISTANT)
    yield Span(" ".join(errand.answer for errand in errands), RESULT)
    yield Span(EOS)


def _call(call: str, certain: float) -> Iterator[Span]:
    """Return a call; its punctuation has the weight `certain`."""
    for part in re.findall(r'[\[\]{}":, ]+|[^\[\]{}":, ]+', call):
        yield Span(part, certain if part[0] in '[]{}":, ' else RECALLED)


def _turn_without_tool(rng: random.Random, mix: Mix, subjects: set[str]) -> Iterator[Span]:
    """Return a question that the model answers itself, because no tool does."""
    kind = rng.random()
    if kind < 0.2 and mix.tale_share > 0.1:
        pieces = [_tale_piece(rng)]
    elif kind < 0.45:
        pieces = [_greeting_piece(rng)]
    elif kind < 0.65 and subjects.isdisjoint(("plus", "minus", "calculator", "search")):
        pieces = [_sum_piece(rng)]
    elif kind < 0.75:
        pieces = [_remark_piece(rng)]
    elif kind < 0.9 and subjects.isdisjoint(("search", "calculator")):
        pieces = [Piece(user=(Span(unanswerable(rng, subjects), CHANCE),), reply=(Span(NO_TOOL),), plain=())]
    else:
        fact = draw_facts(rng, 1)[0]
        pieces = [_fact_piece(rng, fact)]
        if fact.attribute not in subjects:
            pieces.append(_question_piece(rng, fact))
            subjects.add(fact.attribute)
    for piece in pieces:
        first, *others = piece.reply
        yield from (Span(USER, CHANCE), *piece.user, Span(ASSISTANT, CHANCE))
        # The first words decide against a call.
        yield from (Span(first.text, RESULT if len(first.text) < 30 else PLAIN), *others, Span(EOS))


def _instructions(rng: random.Random) -> str:
    """Return a system prompt. Its content does not matter to the model."""
    lines = rng.sample(_INSTRUCTIONS, rng.choice((1, 1, 1, 2, 3)))
    if rng.random() < 0.1:
        lines += [stories.remark(rng) for _ in range(rng.randint(1, 3))]
    return " ".join(lines)


def _as_plain(pieces: Sequence[Piece]) -> list[Span]:
    spans: list[Span] = []
    for piece in pieces:
        spans += (*piece.plain, Span("\n"))
    return [*spans[:-1], Span(EOS)]


def _length(piece: Piece) -> int:
    return sum(len(span.text) for span in piece.plain) + 12


def main() -> None:
    """Print a sample of the corpus."""
    parser = argparse.ArgumentParser(description="Print documents of the training corpus.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    for _ in range(arguments.documents):
        print(document(rng, LONG, arguments.tokens).text, end="\n\n")


if __name__ == "__main__":
    main()
