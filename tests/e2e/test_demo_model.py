"""The bundled model through all processes: it reaches its published quality."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from measure.testbed.service import Served
from quire import AsyncClient
from tools.demo_model.evaluate import (
    CHECKPOINT,
    QUALITY_FILE,
    Item,
    Score,
    Task,
    held_out_arithmetic,
    held_out_questions,
    held_out_recall,
    held_out_stories,
    held_out_tasks,
    perplexity,
    score,
)

ITEMS = 120
CONCURRENCY = 16


@pytest.mark.every(3)
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


@pytest.mark.every(3)
def test_tools_are_called_through_the_served_stack(demo: Served) -> None:
    """Held-out questions get the right call over HTTP, and its result an answer, as often as stated beside the weights.

    The difference of 7 % is two standard errors of the sample.
    """
    stated = json.loads((Path(__file__).parents[2] / CHECKPOINT / QUALITY_FILE).read_text())
    tasks = held_out_tasks(ITEMS, stated["evaluation_seed"])
    right = asyncio.run(_served_tasks(demo.http, tasks))
    assert sum(called for called, _ in right) >= (stated["tool_call_accuracy"] - 0.07) * ITEMS
    assert sum(answered for _, answered in right) >= (stated["tool_answer_accuracy"] - 0.07) * ITEMS


async def _served_tasks(address: str, tasks: list[Task]) -> list[tuple[bool, bool]]:
    """Return for each task whether its question got the right call, and whether its result got the right answer."""
    turns = asyncio.Semaphore(CONCURRENCY)

    async with httpx.AsyncClient(base_url=f"http://{address}/v1", timeout=60, trust_env=False) as client:

        async def say(task: Task, messages: list[dict[str, Any]]) -> dict[str, Any]:
            tools = [tool.definition for tool in task.tools]
            body = {"model": "demo", "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 96}
            async with turns:
                answer = await client.post("chat/completions", json=body)
            message: dict[str, Any] = answer.raise_for_status().json()["choices"][0]["message"]
            return message

        async def run(task: Task) -> tuple[bool, bool]:
            errand = task.errand
            asked: dict[str, Any] = {"role": "user", "content": errand.question}
            calls = (await say(task, [asked])).get("tool_calls") or []
            made = [(each["function"]["name"], each["function"]["arguments"]) for each in calls]
            right = {"name": errand.tool.name, "arguments": json.dumps(dict(errand.arguments), ensure_ascii=False)}
            call = {"id": "call_1", "type": "function", "function": right}
            told: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": errand.result}
            answer = await say(task, [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, told])
            return made == [(right["name"], right["arguments"])], answer["content"] == errand.answer

        return await asyncio.gather(*map(run, tasks))


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
