"""A request that kills the process computing it."""

import asyncio
from pathlib import Path

import pytest

from checks.chaos.campaign import HOOKS
from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import serve
from quire import AsyncClient
from quire.errors import QuireError
from tests.e2e.load import Answer, draw_prompts, generate

POISON = [371, 372, 373]
"""The model does not say that by itself."""


def test_a_poison_prompt_ends_with_an_error_for_itself_only(tmp_path: Path) -> None:
    """A request that crashes its worker ends with POISON_REQUEST after four crashes; all other streams complete."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    answers = [Answer(prompt, 60) for prompt in draw_prompts([3, 30, 100], oracle.vocab_size, seed=2)]
    hooks = {"PYTHONPATH": str(HOOKS), "CHAOS_POISON": ",".join(map(str, POISON))}
    with serve(checkpoint, "--dtype=float32", environ=hooks) as served:
        asyncio.run(_run(served.grpc, answers))
        served.wait_until_empty()
        deaths = served.log.read_text().count('"process died"')
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == 60
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert deaths == 4


async def _run(target: str, answers: list[Answer]) -> None:
    async with AsyncClient(target) as client, asyncio.TaskGroup() as tasks:
        for answer in answers:
            tasks.create_task(generate(client, answer))
        generation = client.generate(token_ids=[20, *POISON, 21], max_tokens=8, ignore_eos=True, timeout=240)
        with pytest.raises(QuireError) as caught:
            await anext(generation)
    assert caught.value.reason == "POISON_REQUEST"
