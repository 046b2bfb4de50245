"""The draft model: its KV follows the rows through everything that happens to their blocks.

A model that drafts for itself is right every time, but only if all of its KV is. So the tests count rejected drafts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from checks.driver import GREEDY, Driver, execute, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.config import ConfigError
from tests.worker_svc.fake_accelerator import FakeAccelerator
from worker_svc.execution.engine import Engine

RANDOM = plan_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=1 << 60)
COUNT = 40
MOST = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def sibling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a smaller checkpoint with the same tokenizer and another KV shape."""
    folder = tmp_path_factory.mktemp("sibling")
    return make_checkpoint(
        "Qwen3ForCausalLM", folder, num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1
    )


def drafting(model: Path, draft: Path, accelerator: FakeAccelerator | None = None, **settings: Any) -> Engine:
    """An engine with a draft model."""
    return make_engine(
        model,
        accelerator=accelerator,
        dtype="float32",
        block_size=8,
        max_num_seqs=4,
        speculation="draft",
        draft_model=str(draft),
        speculative_tokens=MOST,
        **settings,
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_output_is_that_without_speculation(checkpoint: Path, sibling: Path, own: bool, asynchronous: bool) -> None:
    """Rows with changing limits, holds and recomputation give their tokens.

    All drafts of the model itself are right.
    """
    requests = [([1, 2, 3], GREEDY), ([4] * 20, RANDOM), (list(range(50)), GREEDY), ([9, 8] * 12, RANDOM)]
    plain = Driver(make_engine(checkpoint, dtype="float32"))
    expected = [prompt + plain.generate(prompt, COUNT, sampling=sampling) for prompt, sampling in requests]
    driver = Driver(
        drafting(checkpoint, checkpoint if own else sibling, FakeAccelerator() if asynchronous else None), seed=5
    )
    rng = driver.rng
    waiting = list(range(len(requests)))
    running: dict[int, int] = {}
    known: list[list[int]] = [prompt for prompt, _ in requests]
    recomputed = 0
    while waiting or running:
        for request in waiting:
            row = driver.admit(known[request], sampling=requests[request][1])
            driver.plan.admissions[-1].num_prompt_tokens = len(requests[request][0])
            running[row] = request
        waiting = []
        for row in running:
            state = driver.rows[row]
            if state.in_prefill:
                driver.chunk(row, int(rng.integers(1, min(16, state.num_known - state.computed) + 1)))
            elif state.held or rng.random() < 0.05:
                (driver.release if state.held else driver.hold)(row)
            if rng.random() < 0.2:
                driver.speculate(row, int(rng.choice([0, 1, 2, MOST])))
        driver.step()
        for row, request in list(running.items()):
            tokens = driver.rows[row].tokens
            assert tokens[: len(expected[request])] == expected[request][: len(tokens)]
            if len(tokens) >= len(expected[request]):
                driver.leave(row)
                del running[row]
            elif rng.random() < 0.02 and not driver.rows[row].in_prefill:
                known[request] = driver.leave(row)
                del running[row]
                waiting.append(request)
                recomputed += 1

    assert recomputed
    assert driver.num_drafted > 40
    assert (driver.num_accepted == driver.num_drafted) == own


def test_the_passes_of_the_draft_model_are_captured(checkpoint: Path, sibling: Path) -> None:
    """A step with drafts is one replay per pass of the draft model, and one of the model."""
    device = FakeAccelerator()
    driver = Driver(drafting(checkpoint, sibling, device))
    row = driver.admit([1, 2, 3])
    driver.chunk(row, 3)
    driver.speculate(row, MOST)
    driver.step()
    device.log.clear()

    driver.step()

    assert len([entry for entry in device.log if entry.startswith("replay")]) == MOST + 1


def test_a_row_whose_drafts_were_off_for_long_catches_up_in_parts(checkpoint: Path) -> None:
    """The draft model computes the missing tokens before it proposes again, and is right again."""
    driver = Driver(drafting(checkpoint, checkpoint, max_model_len=1024))
    row = driver.admit([5, 6, 7])
    driver.chunk(row, 3)
    while len(driver.rows[row].tokens) < 600:
        driver.step()
    driver.speculate(row, MOST)
    steps_without = 0
    while driver.num_drafted < 20:
        driver.step()
        steps_without += not driver.num_drafted

    assert 1 <= steps_without <= 3
    assert driver.num_accepted == driver.num_drafted


def test_shared_copied_and_swapped_blocks_have_the_kv_of_the_draft_model(checkpoint: Path) -> None:
    """A row that continues from another row's blocks gets right drafts at once.

    It shares one block, copies another, and was swapped to the host and back into other blocks.
    """
    engine = drafting(checkpoint, checkpoint, host_cache="1MiB")
    prompt = [(7 * index + 3) % VOCAB_SIZE for index in range(20)]
    expected = Driver(engine).generate(prompt, 12)
    engine.reset()

    def admission(row: int, tokens: list[int], blocks: list[int], computed: int) -> plan_pb2.Admission:
        return plan_pb2.Admission(
            row=row, generation=1, token_ids=to_column(tokens), block_tables=[to_column(blocks)],
            num_prompt_tokens=20, num_computed_tokens=computed,
        )  # fmt: skip

    execute(
        engine,
        plan_pb2.Plan(
            step=1,
            admissions=[admission(0, prompt, [1, 2, 3, 4], 0)],
            chunk_rows=to_column([0]),
            chunk_lengths=to_column([20]),
        ),
    )
    swapped = plan_pb2.Plan(
        step=2,
        leaves=to_column([0]),
        swap_out_blocks=to_column([3]),
        swap_out_host_blocks=to_column([0]),
        copy_sources=to_column([2]),
        copy_targets=to_column([6]),
        copy_ids=to_column([11]),
    )
    execute(engine, swapped)
    with torch.inference_mode():
        for tensor in engine._pool.tensors:
            tensor[[2, 3]] = torch.nan
    last = prompt + expected[:1]
    result = execute(
        engine,
        plan_pb2.Plan(
            step=3,
            admissions=[admission(1, last, [1, 6, 7, 8, 9], 20)],
            swap_in_blocks=to_column([7]),
            swap_in_host_blocks=to_column([0]),
            copy_ids=to_column([12]),
            chunk_rows=to_column([1]),
            chunk_lengths=to_column([1]),
            draft_rows=to_column([1]),
            draft_limits=to_column([MOST]),
        ),
    )
    assert result.tokens == to_column(expected[1:2])

    result = execute(engine, plan_pb2.Plan(step=4))

    assert (result.draft_counts, result.counts) == (to_column([MOST]), to_column([MOST + 1]))
    assert result.tokens == to_column(expected[2 : 2 + MOST + 1])


@pytest.mark.parametrize("way", ["shared", "copied", "swapped"])
@pytest.mark.parametrize("paused", [False, True])
def test_drafts_after_a_pause_are_as_good_as_without(checkpoint: Path, paused: bool, way: str) -> None:
    """A request continues from tokens that another row sampled, with or without drafts: no draft is rejected.

    The draft model computes the missing KV in these tokens' blocks.
    """
    driver = Driver(drafting(checkpoint, checkpoint, host_cache="1MiB", max_model_len=512))
    prompt = [(7 * index + 3) % VOCAB_SIZE for index in range(21)]
    row = driver.admit(prompt)
    driver.chunk(row, len(prompt))
    driver.speculate(row, 0 if paused else MOST)
    while len(driver.rows[row].tokens) < 70:
        driver.step()
    assert (driver.num_drafted == 0) == paused
    blocks, driver.rows[row].blocks = driver.rows[row].blocks, []  # The blocks stay in use.
    history = driver.leave(row)
    plan = driver.plan
    match way:
        case "shared":
            blocks, computed = blocks[:6], 48
        case "copied":
            source, blocks, computed = blocks[6], [*blocks[:6], driver.take_block()], 50
            plan.copy_sources, plan.copy_targets = to_column([source]), to_column([blocks[-1]])
        case "swapped":
            computed = len(history) - 1
            on_host = to_column(list(range(len(blocks))))
            plan.swap_out_blocks, plan.swap_out_host_blocks, plan.copy_ids = to_column(blocks), on_host, to_column([1])
            driver.step()
            blocks, plan = [driver.take_block() for _ in blocks], driver.plan
            plan.swap_in_blocks, plan.swap_in_host_blocks, plan.copy_ids = to_column(blocks), on_host, to_column([2])
    driver.num_drafted = driver.num_accepted = 0

    row = driver.admit(history, blocks=blocks, computed=computed)
    driver.chunk(row, len(history) - computed)
    driver.speculate(row, MOST)
    for _ in range(6):
        driver.step()

    assert driver.num_drafted == driver.num_accepted == 5 * MOST


def test_blocks_are_sized_for_both_models(checkpoint: Path, sibling: Path) -> None:
    """The KV cache has fewer blocks with a draft model, by the share of its layers."""
    memory: dict[str, Any] = {"kv_cache_memory": "300KiB", "max_model_len": 512}
    plain = make_engine(checkpoint, dtype="float32", block_size=8, max_num_seqs=4, **memory)
    engine = drafting(checkpoint, sibling, **memory)

    per_block = [
        sum(tensor[0].nbytes for pair in caches for tensor in pair)
        for caches in (engine._caches, engine._proposer._caches)  # type: ignore[union-attr]
    ]
    assert plain.limits.num_blocks == (300 << 10) // per_block[0]
    assert engine.limits.num_blocks == (300 << 10) // sum(per_block)


def test_the_demo_model_has_a_draft_model_of_its_own() -> None:
    """Without draft_model, the model 'demo' gets the draft model that ships with it."""
    engine = make_engine(Path("demo"), speculation="draft", dtype="float32")

    assert len(engine._proposer._model.kv_shapes) == 1  # type: ignore[union-attr]


def test_draft_models_that_do_not_fit_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """The refusal names the setting and what does not fit."""
    others = {
        "its vocabulary has 400 tokens": make_checkpoint("LlamaForCausalLM", tmp_path / "wide", vocab_size=400),
        "exceeds the model's 64 positions": make_checkpoint(
            "LlamaForCausalLM", tmp_path / "short", max_position_embeddings=64
        ),
        "its tokens differ": make_checkpoint("LlamaForCausalLM", tmp_path / "other"),
    }
    path = others["its tokens differ"] / "tokenizer.json"
    path.write_text(path.read_text().replace("<|pad|>", "<|fill|>"))
    for reason, folder in others.items():
        with pytest.raises(ConfigError, match=f"draft_model: .*{reason}"):
            drafting(checkpoint, folder)
    with pytest.raises(ConfigError, match="draft_model: missing"):
        make_engine(checkpoint, speculation="draft")
    with pytest.raises(ConfigError, match="speculation is not draft"):
        make_engine(checkpoint, draft_model=str(checkpoint))
