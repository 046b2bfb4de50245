"""The bundled model and the corpus it comes from.

Promises: nothing held out is in the training data (read back from the text, not from the generator's records). The same
seed gives the same corpus. The tokenizer loses nothing. The committed checkpoint loads in plain transformers and
answers held-out questions.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_model import evaluate, stories, words
from tools.demo_model.corpus import (
    ASSISTANT,
    BOS,
    DENSE,
    EOS,
    LONG,
    MIDDLE,
    USER,
    check_training_side,
    document,
    sequences,
)
from tools.demo_model.problems import ATTRIBUTES, Fact, Problem, draw_facts, draw_problem

CHECKPOINT = Path(__file__).parents[2] / "shared" / "demo_model"
SAMPLE_DOCUMENTS = 4000

_PROBLEM = re.compile(r"(\d+) (plus|minus|\+|-) (\d+)")
_FACT = re.compile(rf"The ({'|'.join(ATTRIBUTES)}) of (\w+) is ([^.]+)\.")
_OPERATORS = {"+": "plus", "-": "minus"}


@cache
def sample() -> str:
    """Thousands of documents from every training stage."""
    rng = random.Random(7)
    mixes = (DENSE, MIDDLE, LONG)
    return "\n".join(document(rng, mixes[n % 3], 512).text for n in range(SAMPLE_DOCUMENTS))


def problems_in(text: str) -> Iterator[Problem]:
    """Yield the problems that occur in a text."""
    for left, operator, right in _PROBLEM.findall(text):
        yield Problem(int(left), _OPERATORS.get(operator, operator), int(right))


@cache
def checkpoint() -> tuple[Any, Any]:
    """The committed model and tokenizer, through the plain Auto classes."""
    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32")
    return model, AutoTokenizer.from_pretrained(CHECKPOINT)


def test_no_held_out_problem_is_ever_written() -> None:
    """Every sum and difference that occurs in the corpus, in any wording, is on the training side."""
    problems = set(problems_in(sample()))

    assert len(problems) > 5000
    assert not [problem for problem in problems if problem.held_out]


def test_no_held_out_name_is_ever_written() -> None:
    """No held-out name occurs anywhere in the corpus, not even in a story or as a value."""
    written = set(re.findall(r"\w+", sample()))

    assert len(written & set(words.TRAINING_NAMES)) > 1000
    assert not written & set(words.HELD_OUT_NAMES)


def test_no_held_out_fact_is_ever_written() -> None:
    """Every fact that the corpus states or answers is on the training side."""
    facts = {Fact(name, attribute, value) for attribute, name, value in _FACT.findall(sample())}

    assert len(facts) > 4000
    assert not [fact for fact in facts if fact.held_out]


def test_writing_a_held_out_item_is_refused() -> None:
    """The generator itself stops at an item that is reserved for measuring."""
    rng = random.Random(0)

    items: list[Problem | Fact | stories.Cast] = [
        draw_problem(rng, held_out=True),
        stories.draw_cast(rng, held_out=True),
    ]
    for item in (*items, *draw_facts(rng, 1, held_out=True)):
        with pytest.raises(AssertionError, match="held out"):
            check_training_side(item)


def test_swapped_operands_are_on_the_same_side_of_the_split() -> None:
    """The sum a + b is held out exactly when b + a is, so that neither reveals the other."""
    pairs = [(a, b) for a in range(100) for b in range(a)]

    assert all(Problem(a, "plus", b).held_out == Problem(b, "plus", a).held_out for a, b in pairs)


def test_every_result_in_the_corpus_is_right() -> None:
    """The corpus never states a wrong result."""
    stated = re.findall(r"(\d+) (plus|minus|\+|-) (\d+) (?:is|=) (\d+)", sample())

    assert len(stated) > 5000
    for left, operator, right, result in stated:
        problem = Problem(int(left), _OPERATORS.get(operator, operator), int(right))
        assert problem.answer == int(result), problem


def test_every_answer_follows_from_its_page() -> None:
    """A question about a fact follows exactly one statement of that fact, and the answer repeats it."""
    rng = random.Random(3)
    for _ in range(300):
        text = document(rng, LONG, 512).text
        stated: dict[tuple[str, str], str] = {}
        for attribute, name, value in _FACT.findall(text):
            assert stated.setdefault((attribute, name), value) == value


def test_same_seed_same_corpus() -> None:
    """Training sequences are a function of seed and step alone."""
    first = sequences(seed=5, step=17, count=3, tokens=256, mix=MIDDLE)
    sequences(seed=5, step=18, count=3, tokens=256, mix=MIDDLE)

    assert sequences(seed=5, step=17, count=3, tokens=256, mix=MIDDLE) == first
    assert sequences(seed=6, step=17, count=3, tokens=256, mix=MIDDLE) != first


def test_held_out_lists_are_reproducible_and_held_out() -> None:
    """The problem lists depend on their arguments alone, hold no item twice and only items kept from training."""
    items = evaluate.held_out_arithmetic(300, seed=1)
    asked = [problem for item in items for problem in problems_in(item.prompt)]

    assert items == evaluate.held_out_arithmetic(300, seed=1)
    assert len(set(asked)) == 300
    assert all(problem.held_out for problem in asked)


def test_recall_items_keep_their_distance() -> None:
    """Each recall item asks for a held-out fact that its prompt states once, 200 to 600 tokens before the question."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    items = evaluate.held_out_recall(60, seed=1, tokenizer=tokenizer)

    assert len(evaluate.by_distance(items)) == 4
    for item in items:
        attribute, name, value = _FACT.findall(item.expected)[0]
        after = item.prompt.split(item.expected + "\n")[1].split("Question:")[0]
        assert Fact(name, attribute, value).held_out
        assert item.prompt.count(item.expected) == 1
        assert len(tokenizer.encode(after, add_special_tokens=False).ids) == item.distance
        assert evaluate.NEAREST <= item.distance <= evaluate.FARTHEST


def test_tokenizer_round_trip() -> None:
    """Decoding the tokens of any text returns the text, even if the corpus does not contain it."""
    tokenizer = checkpoint()[1]
    texts = [*sample().splitlines()[:300], "naïve café, 東京 🦊\t\x00", "  two  spaces\n\n", "x = {'a': [1, 2]}"]

    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_digit_is_a_token() -> None:
    """A number of n digits is n tokens, wherever it stands."""
    tokenizer = checkpoint()[1]

    assert tokenizer.tokenize("The code is 4821.")[-5:] == ["4", "8", "2", "1", "."]


def test_chat_template_writes_the_turns_of_the_corpus() -> None:
    """A message starts with its role's token, an answer ends with EOS, generation starts after the assistant token."""
    tokenizer = checkpoint()[1]
    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye."},
    ]

    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert text == f"{BOS}{USER}Hi.{ASSISTANT}Hello.{EOS}{USER}Bye.{ASSISTANT}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.convert_ids_to_tokens(ids[0]), ids.count(tokenizer.eos_token_id)] == [BOS, 1]


def test_checkpoint_is_small() -> None:
    """The checkpoint that every clone carries stays below 16 MB."""
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 16_000_000


def test_held_out_answers_through_plain_generate() -> None:
    """A sample of held-out sums, differences and recalled facts is answered as well as quality.json states."""
    model, tokenizer = checkpoint()
    complete = evaluate.generate_with(model, tokenizer)
    items = [
        *evaluate.held_out_arithmetic(24, seed=2),
        *evaluate.held_out_recall(16, seed=2, tokenizer=tokenizer.backend_tokenizer),
    ]

    score = asyncio.run(evaluate.score(items, complete))

    assert score.accuracy >= 0.9, score.wrong


def test_a_story_ends_by_itself() -> None:
    """The model tells a requested story about a fox and stops."""
    model, tokenizer = checkpoint()
    complete = evaluate.generate_with(model, tokenizer, chat=True)

    story = complete("Tell me a story about a fox.", 400)

    assert "fox" in story
    assert 40 < len(tokenizer.encode(story)) < 400


def test_story_perplexity_is_the_stated_one() -> None:
    """Perplexity of held-out stories agrees with the figure stated beside the weights."""
    model, tokenizer = checkpoint()
    stated = json.loads((CHECKPOINT / evaluate.QUALITY_FILE).read_text())

    measured = evaluate.perplexity(model, tokenizer, evaluate.held_out_stories(40, seed=2))

    assert measured == pytest.approx(stated["story_perplexity"], rel=0.1)
