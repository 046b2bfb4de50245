"""The training corpus: a deterministic stream of documents, made from a seed while training reads it.

A document is a page of pieces in random order: facts, questions about earlier facts of the page, arithmetic, stories
and single remarks. A piece is written either as plain text or as a chat in the tokens of the chat template. Each
stretch of text has a loss weight. Answers that can be known weigh more. Random text (operands, the value of a new fact)
weighs little, because it teaches nothing.

`sequences(seed, step, ...)` depends only on its arguments. A training run therefore resumes at any step without a
stored position in the data, and no document is stored.

The corpus contains nothing that `split` holds out. `check_training_side` asserts it for every problem and fact.

    python -m tools.demo_model.corpus --seed 0 --documents 3      print a sample
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.demo_model import stories
from tools.demo_model.problems import Fact, Problem, draw_facts, draw_problem

BOS, EOS, PAD = "<|bos|>", "<|endoftext|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)

CHANCE, PLAIN, RESULT, RECALLED = 0.1, 1.0, 4.0, 6.0
_CHARACTERS_PER_TOKEN = 3.2


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of text and the loss weight of each of its tokens."""

    text: str
    weight: float = PLAIN


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the corpus, with its special tokens written out."""

    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        """The text of the document."""
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Piece:
    """One turn of a page: the user's question, the answer, and the same as plain text."""

    user: tuple[Span, ...]
    reply: tuple[Span, ...]
    plain: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """The distribution of documents at one stage of training.

    `pages`, `sums` and `tales` are relative shares of documents. `tale_share` is the probability that the filler of a
    page is a whole story instead of one remark or problem. `facts` is the smallest and largest number of facts on a
    page. `most_sums` is the largest number of problems in a document that contains only problems.
    """

    pages: float
    sums: float
    tales: float
    tale_share: float
    facts: tuple[int, int]
    most_sums: int


DENSE = Mix(pages=0.60, sums=0.32, tales=0.08, tale_share=0.05, facts=(1, 4), most_sums=12)
MIDDLE = Mix(pages=0.45, sums=0.45, tales=0.10, tale_share=0.35, facts=(2, 6), most_sums=30)
LONG = Mix(pages=0.42, sums=0.45, tales=0.13, tale_share=0.75, facts=(2, 8), most_sums=30)
EVEN = Mix(pages=0.60, sums=0.25, tales=0.15, tale_share=0.75, facts=(2, 8), most_sums=12)


def check_training_side(item: Problem | Fact | stories.Cast) -> None:
    """Raise an error for an item that is held out."""
    if item.held_out:
        raise AssertionError(f"held out, must not be written into the corpus: {item}")


def document(rng: random.Random, mix: Mix, tokens: int) -> Document:
    """Return a random document of at most about `tokens` tokens."""
    kind = rng.choices(("page", "sums", "tale"), (mix.pages, mix.sums, mix.tales))[0]
    budget = tokens * _CHARACTERS_PER_TOKEN
    if kind == "page":
        pieces = list(_page(rng, mix, budget))
    elif kind == "sums":
        pieces = [_sum_piece(rng) for _ in range(rng.randint(1, max(1, min(mix.most_sums, int(budget // 70)))))]
    else:
        pieces = [_tale_piece(rng)]
    spans = _as_chat(pieces) if rng.random() < 0.45 else _as_plain(pieces)
    opening = (Span(BOS, 0.0),) if rng.random() < 0.8 else ()
    return Document((*opening, *spans))


def sequences(seed: int, step: int, count: int, tokens: int, mix: Mix) -> list[list[Document]]:
    """Return the documents of `count` training sequences of about `tokens` tokens each."""
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
    asked = (Span("What is "), left, verb, right, Span("?"))
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


def _question_and_answer(asked: Sequence[Span], answer: Sequence[Span]) -> tuple[Span, ...]:
    return (Span("Question: "), *asked, Span("\nAnswer: "), *answer)


def _as_chat(pieces: Sequence[Piece]) -> list[Span]:
    spans: list[Span] = []
    for piece in pieces:
        spans += (Span(USER, CHANCE), *piece.user, Span(ASSISTANT), *piece.reply, Span(EOS))
    return spans


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
