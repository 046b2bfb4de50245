"""Evaluates the bundled model: held-out arithmetic, recall by distance, tool calls, and perplexity of stories.

Arithmetic and recall are measured through a function `complete(prompt, max_tokens) -> str`, plain or async: here the
`generate` of transformers, in a test the whole server. The problem lists depend only on their arguments and contain
only items that `split` excludes from the corpus.

    python -m tools.demo_model.evaluate shared/demo_model            print the results
    python -m tools.demo_model.evaluate shared/demo_model --write    and write them to quality.json
    python -m tools.demo_model.evaluate shared/demo_model --draft shared/demo_draft    acceptance of the draft model
"""

import argparse
import asyncio
import inspect
import json
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer

from tools.demo_model import stories
from tools.demo_model.corpus import (
    ASSISTANT,
    BOS,
    CALL,
    CALL_END,
    EOS,
    RESPONSE,
    RESPONSE_END,
    SYSTEM,
    USER,
    tool_list,
)
from tools.demo_model.errand import Errand, Tool
from tools.demo_model.problems import Problem, draw_facts, draw_problem
from tools.demo_model.tool_use import competing, draw_errand

Complete: TypeAlias = Callable[[str, int], str] | Callable[[str, int], Awaitable[str]]

NEAREST, FARTHEST, BUCKET = 200, 600, 100
_REMARK_TOKENS = 30
ANSWER_TOKENS = 32
CALL_TOKENS = 96
_MOST_TOOLS = 4
CHECKPOINT = Path("shared/demo_model")
QUALITY_FILE = "quality.json"


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt with its only correct continuation; `distance` is the number of tokens from the fact to the question."""

    prompt: str
    expected: str
    distance: int = 0

    def is_answered_by(self, completion: str) -> bool:
        """Return whether `completion` starts with the expected text, followed by the end of the word or number."""
        said = completion.lstrip()
        return said.startswith(self.expected) and not said[len(self.expected) :][:1].isalnum()


@dataclass(frozen=True, slots=True)
class Score:
    """The number of items answered correctly, and the other items with their wrong answers."""

    right: int
    total: int
    wrong: tuple[tuple[Item, str], ...]

    @property
    def accuracy(self) -> float:
        """Share of the items that were answered correctly."""
        return self.right / self.total


@dataclass(frozen=True, slots=True)
class Quality:
    """A checkpoint's published results."""

    arithmetic_accuracy: float
    arithmetic_chat_accuracy: float
    recall_accuracy: float
    recall_accuracy_by_distance: dict[str, float]
    story_perplexity: float
    tool_choice_accuracy: float
    no_tool_accuracy: float
    tool_call_accuracy: float
    tool_answer_accuracy: float
    items_each: int
    evaluation_seed: int


def held_out_arithmetic(n: int, seed: int) -> list[Item]:
    """Return `n` different held-out problems in the three plain wordings of the corpus."""
    return [_plain_problem(problem, style % 3) for style, problem in enumerate(_problems(n, seed))]


def held_out_questions(n: int, seed: int) -> list[Item]:
    """Return `n` different held-out problems as user questions; each prompt is one chat message."""
    return [Item(f"What is {problem.phrase}?", _sentence(problem)) for problem in _problems(n, seed)]


def held_out_recall(n: int, seed: int, tokenizer: Tokenizer | None = None) -> list[Item]:
    """Return `n` texts that state facts, continue with 200 to 600 tokens of filler, and ask for one fact.

    Distances are spread evenly. All names are held out, and the other facts share the attributes.
    """
    counted_by = tokenizer or Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    rng = random.Random(f"recall/{seed}")
    span = FARTHEST - _REMARK_TOKENS - NEAREST
    return [_recall_item(rng, NEAREST + span * (index + rng.random()) / n, counted_by) for index in range(n)]


def held_out_stories(n: int, seed: int) -> list[str]:
    """Return `n` stories about casts that the corpus never has."""
    rng = random.Random(f"stories/{seed}")
    return [stories.tell(rng, stories.draw_cast(rng, held_out=True)) for _ in range(n)]


@dataclass(frozen=True, slots=True)
class Task:
    """A held-out errand, and the tools offered with its question, one of which is right."""

    tools: tuple[Tool, ...]
    errand: Errand

    @property
    def asked(self) -> str:
        """The prompt up to the turn of the model."""
        return asked(self.tools, self.errand.question)

    @property
    def choice(self) -> Item:
        """The item that a call of the right tool answers."""
        return Item(self.asked, f'{CALL}\n{{"name": "{self.errand.tool.name}"')

    @property
    def call(self) -> Item:
        """The item that the right call with the right arguments answers."""
        return Item(self.asked, f"{CALL}\n{self.errand.call()}\n{CALL_END}")

    @property
    def answer(self) -> Item:
        """The item that the sentence with the tool's result answers."""
        result = f"{USER}{RESPONSE}\n{self.errand.result}\n{RESPONSE_END}{ASSISTANT}"
        return Item(f"{self.call.prompt}{self.call.expected}{EOS}{result}", self.errand.answer)


def asked(tools: Iterable[Tool], question: str) -> str:
    """Return the prompt that asks `question` and offers `tools`."""
    return f"{SYSTEM}{tool_list(list(tools))}{USER}{question}{ASSISTANT}"


def held_out_tasks(n: int, seed: int) -> list[Task]:
    """Return `n` held-out errands, each among one to four tools."""
    rng = random.Random(f"tools/{seed}")
    tasks: list[Task] = []
    while len(tasks) < n:
        errand = draw_errand(rng, held_out=True)
        tools = {errand.tool.name: errand.tool, **_other_tools(rng, errand.subject, rng.randrange(_MOST_TOOLS))}
        tasks.append(Task(tuple(rng.sample(list(tools.values()), len(tools))), errand))
    return tasks


def held_out_direct(n: int, seed: int) -> list[Item]:
    """Return `n` problems and story requests that no offered tool serves; each expected text is the answer's start."""
    rng = random.Random(f"direct/{seed}")
    items: list[Item] = []
    while len(items) < n:
        tools = _other_tools(rng, "", rng.randint(1, _MOST_TOOLS), without=("plus", "minus", "calculator", "search"))
        if len(items) % 2:
            problem = draw_problem(rng, held_out=True)
            items.append(Item(asked(tools.values(), f"What is {problem.phrase}?"), _sentence(problem)))
        else:
            request = stories.request(rng, stories.draw_cast(rng, held_out=True))
            items.append(Item(asked(tools.values(), request), ""))
    return items


async def score(
    items: Iterable[Item], complete: Complete, concurrency: int = 1, max_tokens: int = ANSWER_TOKENS
) -> Score:
    """Call `complete` for each item, up to `concurrency` at a time when it is async."""
    turns = asyncio.Semaphore(concurrency)

    async def answer(item: Item) -> tuple[Item, str]:
        async with turns:
            said = complete(item.prompt, max_tokens)
            return item, (await said if inspect.isawaitable(said) else said)

    answers = await asyncio.gather(*map(answer, items))
    wrong = tuple((item, said) for item, said in answers if not item.is_answered_by(said))
    return Score(len(answers) - len(wrong), len(answers), wrong)


def by_distance(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Group the items in buckets of 100 tokens, named like "200-299"."""
    buckets: dict[str, list[Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.distance):
        low = min(item.distance // BUCKET * BUCKET, FARTHEST - BUCKET)
        buckets[f"{low}-{low + BUCKET - 1}"].append(item)
    return dict(buckets)


def perplexity(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """Return exp of the mean loss per token over `texts`, each between a BOS token and its end token."""
    import torch

    loss, count = 0.0, 0
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(BOS + text + EOS, add_special_tokens=False, return_tensors="pt").input_ids
            logits = model(input_ids=ids).logits[0, :-1].float()
            loss += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
    return math.exp(loss / count)


def acceptance(model: Any, draft: Any, tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> float:
    """Return the fraction of tokens in the model's greedy continuations that the draft model also chooses."""
    import torch

    accepted, count = 0, 0
    with torch.inference_mode():
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            output = model.generate(ids, max_new_tokens=max_tokens, do_sample=False)
            drafts = draft(input_ids=output).logits[0, ids.shape[1] - 1 : -1].argmax(-1)
            accepted += int((drafts == output[0, ids.shape[1] :]).sum())
            count += len(drafts)
    return accepted / count


def generate_with(model: Any, tokenizer: Any, chat: bool = False) -> Callable[[str, int], str]:
    """Return a greedy `complete` based on `generate`; with `chat`, the prompt is sent as one user message."""
    import torch

    def complete(prompt: str, max_tokens: int) -> str:
        if chat:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(prompt, add_special_tokens=not chat, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        said: str = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        return said

    return complete


def measure(folder: Path, items: int, seed: int) -> Quality:
    """Measure the checkpoint in `folder`, with transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain, chat = generate_with(model, tokenizer), generate_with(model, tokenizer, chat=True)
    recall = held_out_recall(items, seed, Tokenizer.from_file(str(folder / "tokenizer.json")))

    def accuracy(asked: Iterable[Item], complete: Complete) -> float:
        return round(asyncio.run(score(asked, complete)).accuracy, 4)

    tasks = held_out_tasks(items, seed)
    calls = asyncio.run(score([task.call for task in tasks], plain, max_tokens=CALL_TOKENS))
    wrong = {item.prompt: said for item, said in calls.wrong}
    choices = [task.choice.is_answered_by(wrong.get(task.asked, task.call.expected)) for task in tasks]
    direct = asyncio.run(score([Item(each.prompt, "\0") for each in held_out_direct(items, seed)], plain)).wrong
    distances = {name: accuracy(bucket, plain) for name, bucket in by_distance(recall).items()}
    sizes = {name: len(bucket) for name, bucket in by_distance(recall).items()}
    return Quality(
        arithmetic_accuracy=accuracy(held_out_arithmetic(items, seed), plain),
        arithmetic_chat_accuracy=accuracy(held_out_questions(items, seed), chat),
        recall_accuracy=round(sum(distances[name] * sizes[name] for name in sizes) / items, 4),
        recall_accuracy_by_distance=distances,
        story_perplexity=round(perplexity(model, tokenizer, held_out_stories(items, seed)), 4),
        tool_choice_accuracy=round(sum(choices) / items, 4),
        no_tool_accuracy=round(sum(CALL not in said for _, said in direct) / items, 4),
        tool_call_accuracy=round(calls.accuracy, 4),
        tool_answer_accuracy=accuracy([task.answer for task in tasks], plain),
        items_each=items,
        evaluation_seed=seed,
    )


def _other_tools(rng: random.Random, subject: str, count: int, without: Sequence[str] = ()) -> dict[str, Tool]:
    """Return `count` tools by name, excluding those that serve `subject` and those in `without`."""
    tools: dict[str, Tool] = {}
    subjects = {subject, *without}
    while len(tools) < count:
        other = draw_errand(rng, held_out=rng.random() < 0.5)
        if subjects.isdisjoint(competing(other.subject)):
            tools.setdefault(other.tool.name, other.tool)
            subjects.add(other.subject)
    return tools


def measure_draft(folder: Path, draft: Path, items: int, seed: int) -> dict[str, float]:
    """Return the acceptance of the draft model in `draft` by kind of text, on held-out prompts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    small: Any = AutoModelForCausalLM.from_pretrained(draft, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(f"requests/{seed}")
    requests = [stories.request(rng, stories.draw_cast(rng, held_out=True)) for _ in range(items)]
    tasks = held_out_tasks(items, seed)
    prompts = {
        "story_acceptance": [f"{USER}{request}{ASSISTANT}" for request in requests],
        "arithmetic_acceptance": [item.prompt for item in held_out_arithmetic(items, seed)],
        "recall_acceptance": [item.prompt for item in held_out_recall(items, seed, tokenizer.backend_tokenizer)],
        "tool_call_acceptance": [task.asked for task in tasks],
        "tool_answer_acceptance": [task.answer.prompt for task in tasks],
    }
    return {name: round(acceptance(model, small, tokenizer, each, CALL_TOKENS), 4) for name, each in prompts.items()}


def _problems(n: int, seed: int) -> list[Problem]:
    rng = random.Random(f"arithmetic/{seed}")
    problems: dict[Problem, None] = {}
    while len(problems) < n:
        problems[draw_problem(rng, held_out=True)] = None
    return list(problems)


def _plain_problem(problem: Problem, style: int) -> Item:
    if style == 0:
        return Item(f"Question: What is {problem.phrase}?\nAnswer:", _sentence(problem))
    if style == 1:
        return Item(f"{problem.phrase} is", f"{problem.answer}")
    return Item(f"{problem.left} {problem.sign} {problem.right} =", f"{problem.answer}")


def _sentence(problem: Problem) -> str:
    return f"{problem.phrase} is {problem.answer}."


def _recall_item(rng: random.Random, distance: float, tokenizer: Tokenizer) -> Item:
    facts = draw_facts(rng, 4, held_out=True)
    asked = rng.randrange(len(facts))
    lines = [fact.statement for fact in facts]
    room = distance - sum(_length(line, tokenizer) for line in lines[asked + 1 :])
    lines += _filler(rng, room, tokenizer)
    between = sum(_length(line, tokenizer) for line in lines[asked + 1 :])
    text = "".join(line + "\n" for line in lines)
    return Item(f"{text}Question: {facts[asked].question}\nAnswer:", facts[asked].statement, between)


def _filler(rng: random.Random, room: float, tokenizer: Tokenizer) -> list[str]:
    """Return stories, remarks and sums with at least `room` tokens; the excess is less than one remark."""
    lines: list[str] = []
    while room > 0:
        if room > 250 and rng.random() < 0.75:
            line = stories.tell(rng, stories.draw_cast(rng, held_out=True))
        elif rng.random() < 0.25:
            line = _sentence(draw_problem(rng, held_out=True))
        else:
            line = stories.remark(rng)
        lines.append(line)
        room -= _length(line, tokenizer)
    return lines


def _length(line: str, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(line + "\n", add_special_tokens=False))


def main() -> None:
    """Print the results of a checkpoint."""
    parser = argparse.ArgumentParser(description="Measure a checkpoint on held-out items.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", type=Path, help="folder of a draft model: measure its acceptance instead")
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the results to quality.json beside the weights")
    arguments = parser.parse_args()
    if arguments.draft is None:
        folder, results = arguments.folder, asdict(measure(arguments.folder, arguments.items, arguments.seed))
    else:
        folder = arguments.draft
        results = measure_draft(arguments.folder, folder, arguments.items, arguments.seed)
    print(json.dumps(results, indent=2))
    if arguments.write:
        path = folder / QUALITY_FILE
        stated = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(stated | results, indent=2) + "\n")


if __name__ == "__main__":
    main()
