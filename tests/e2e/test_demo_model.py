"""The embedded model through all processes: it reaches its published quality."""

import asyncio
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import AsyncClient
from tests.e2e.harness import Served
from tools.demo_model.evaluate import (
    CHECKPOINT,
    QUALITY_FILE,
    Item,
    Score,
    held_out_arithmetic,
    held_out_questions,
    held_out_recall,
    held_out_stories,
    perplexity,
    score,
)

ITEMS = 120
CONCURRENCY = 16


def test_held_out_problems_are_answered_through_the_served_stack(demo: Served) -> None:
    """The server answers at least 95 % of the held-out arithmetic and recall items correctly.

    Arithmetic is asked as plain text and as chat. Recall spans 200 to 600 tokens. Sixteen requests run at a time.
    """
    scores = asyncio.run(_scores(demo.grpc))
    for name, each in scores.items():
        assert each.right >= 0.95 * each.total, f"{name}: {each.right} of {each.total}; wrong: {each.wrong[:3]}"


def test_stories_are_as_likely_as_stated() -> None:
    """Held-out stories have the perplexity that is stated beside the checkpoint, within 2 %."""
    folder = Path(__file__).parents[2] / CHECKPOINT
    stated = json.loads((folder / QUALITY_FILE).read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = held_out_stories(60, stated["evaluation_seed"])
    measured = perplexity(model, AutoTokenizer.from_pretrained(folder), texts)
    assert abs(measured / stated["story_perplexity"] - 1) <= 0.02


async def _scores(target: str) -> dict[str, Score]:
    async with AsyncClient(target) as client:

        async def continue_text(prompt: str, max_tokens: int) -> str:
            return (await client.generate(prompt, max_tokens=max_tokens, temperature=0).result()).text

        async def answer(question: str, max_tokens: int) -> str:
            messages = [{"role": "user", "content": question}]
            return (await client.generate(messages=messages, max_tokens=max_tokens, temperature=0).result()).text

        async def run(items: list[Item], *, chat: bool = False) -> Score:
            return await score(items, answer if chat else continue_text, CONCURRENCY)

        return {
            "arithmetic": await run(held_out_arithmetic(ITEMS, 1)),
            "arithmetic in a chat": await run(held_out_questions(ITEMS, 1), chat=True),
            "recall": await run(held_out_recall(ITEMS, 1)),
        }
