"""Steps with chunks or drafts as captured graphs, on a simulated device: the tokens without, and one call per step."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.driver import GREEDY, Driver, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from tests.worker_svc.fake_accelerator import FakeAccelerator
from tests.worker_svc.test_speculation import guess
from worker_svc.device.accelerator import Graph
from worker_svc.interface.limits import Limits
from worker_svc.model.step_graphs import draft_shapes, mixed_sizes

SAMPLED = plan_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=1 << 60)
NO_ENTRIES: list[str] = []


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    architecture: str = request.param
    return make_checkpoint(architecture, tmp_path_factory.mktemp(architecture))


def replays(device: FakeAccelerator) -> list[str]:
    """Return the replays since the last call."""
    found = [entry for entry in device.log if entry.startswith("replay")]
    device.log.clear()
    return found


def random_steps(driver: Driver) -> list[list[int]]:
    """Compute eight prompts in chunks of random lengths together with decode rows; return all rows' tokens."""
    left: dict[int, int] = {}
    finished = []
    for step in range(40):
        if step % 4 == 0 and driver.free_rows():
            length = int(driver.rng.integers(1, 90))
            sampling = SAMPLED if step % 8 else GREEDY
            left[driver.admit(driver.rng.integers(0, VOCAB_SIZE, length).tolist(), sampling=sampling)] = length
        for row, tokens in list(left.items()):
            length = min(tokens, int(driver.rng.integers(1, 40)))
            driver.chunk(row, length)
            left[row] -= length
        left = {row: tokens for row, tokens in left.items() if tokens}
        driver.step()
        for row in [row for row in driver.rows if len(driver.rows[row].tokens) > driver.rows[row].num_known + 12]:
            finished.append(driver.leave(row))
    return finished + [driver.rows[row].tokens for row in sorted(driver.rows)]


def test_tokens_are_those_without_graphs(checkpoint: Path) -> None:
    """Chunks of any length with any number of decode rows, with row reuse, sample the same tokens."""
    answers = []
    for device in (None, FakeAccelerator()):
        # The driver draws the same prompts for the same number of blocks, so sequences are too short to free windows.
        engine = make_engine(
            checkpoint, accelerator=device, block_size=8, max_model_len=400, max_num_seqs=4, max_num_batched_tokens=128
        )
        answers.append(random_steps(Driver(engine, seed=7)))

    assert answers[0] == answers[1]


def test_a_step_with_chunks_is_one_replay(checkpoint: Path) -> None:
    """A step up to the largest size is one call, whether it only has chunks or also decode rows."""
    device = FakeAccelerator()
    driver = Driver(make_engine(checkpoint, accelerator=device, max_num_seqs=8))
    replays(device)

    for length, rows in ((20, 8), (100, 8), (33, 8)):
        driver.chunk(driver.admit(list(range(length))), length)
        driver.step()
        assert replays(device) == [f"replay {rows}"]


def test_steps_that_no_graph_computes_run_without(checkpoint: Path) -> None:
    """More tokens than the largest graph, many chunks, log-probabilities of a prompt: no replay, and right tokens."""
    device = FakeAccelerator()
    driver = Driver(make_engine(checkpoint, accelerator=device, max_num_seqs=12))
    plain = Driver(make_engine(checkpoint, max_num_seqs=12))
    scored = plan_pb2.SamplingParams(prompt_logprobs=0)
    replays(device)
    for lengths, sampling in (([300], GREEDY), ([2] * 9, GREEDY), ([5], scored)):
        for each in (driver, plain):
            for length in lengths:
                each.chunk(each.admit(list(range(3, 3 + length)), sampling=sampling), length)
        assert driver.step() == plain.step()
        assert replays(device) == NO_ENTRIES


@pytest.mark.parametrize(("tokens", "replayed"), [(0, NO_ENTRIES), (320, ["replay 8"])])
def test_the_largest_captured_step_can_be_set(checkpoint: Path, tokens: int, replayed: list[str]) -> None:
    """`cuda_graph_tokens` captures larger steps than the default, which is 256 on this device."""
    device = FakeAccelerator()
    driver = Driver(make_engine(checkpoint, accelerator=device, max_num_seqs=8, cuda_graph_tokens=tokens))
    replays(device)

    driver.chunk(driver.admit(list(range(300))), 300)
    driver.step()

    assert replays(device) == replayed


def test_a_step_with_drafts_is_one_replay(checkpoint: Path) -> None:
    """Steps with right and wrong drafts, with and without a chunk, are one call each, and give the tokens without."""
    plain = Driver(make_engine(checkpoint, dtype="float32"))
    prompts = [[5, 6, 7], [8, 9], [10] * 9]
    answers = [prompt + plain.generate(prompt, 60) for prompt in prompts]
    device = FakeAccelerator()
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "speculation": "ngram", "speculative_tokens": 3}
    engine = make_engine(checkpoint, accelerator=device, **settings)
    guess(engine, answers, seed=1)
    driver = Driver(engine)
    replays(device)
    steps = 0
    for row, prompt in enumerate(prompts):
        driver.admit(prompt)
        driver.chunk(row, len(prompt))
        driver.speculate(row, 3)
        for _ in range(4):
            driver.step()
            steps += 1

    assert len(replays(device)) == steps
    assert 0 < driver.num_accepted < driver.num_drafted
    for row, answer in enumerate(answers):
        tokens = driver.rows[row].tokens
        assert tokens == answer[: len(tokens)]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_a_device_that_refuses_captures_serves_without(architecture: str, tmp_path: Path) -> None:
    """The tokens are the same, and the worker starts."""

    class Refusing(FakeAccelerator):
        def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
            raise RuntimeError("operation not permitted when stream is capturing")

    folder = make_checkpoint(architecture, tmp_path)
    expected = Driver(make_engine(folder)).generate([5, 6, 7], 8)

    assert Driver(make_engine(folder, accelerator=Refusing())).generate([5, 6, 7], 8) == expected


def test_a_decoder_of_transformers_decodes_by_graphs(tmp_path: Path) -> None:
    """The trial finds that its graphs compute the decoder's results; its steps with chunks run without graphs."""
    folder, device = make_checkpoint("Gemma2ForCausalLM", tmp_path), FakeAccelerator()
    driver = Driver(make_engine(folder, accelerator=device))
    replays(device)

    tokens = driver.generate([5, 6, 7], 8)

    assert tokens == Driver(make_engine(folder)).generate([5, 6, 7], 8)
    assert replays(device) == ["replay 1"] * 7


def test_a_graph_with_a_constant_of_its_capture_is_not_used(tmp_path: Path) -> None:
    """The trial of a `transformers` decoder compares tokens and positions that the capture has not seen."""

    class Constant:
        def replay(self) -> None:
            """Leave the result of the capture."""

    class Frozen(FakeAccelerator):
        def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
            return Constant(), compute().clone()

    folder = make_checkpoint("Gemma2ForCausalLM", tmp_path)

    tokens = Driver(make_engine(folder, accelerator=Frozen())).generate([5, 6, 7], 8)

    assert tokens == Driver(make_engine(folder)).generate([5, 6, 7], 8)


@given(st.integers(1, 10_000))
def test_sizes_pad_little(most: int) -> None:
    """Sizes end with the largest step. Less than 128 tokens are padding, and less than half of a small step."""
    sizes = mixed_sizes(most)

    assert sizes[-1] == most
    assert sizes[0] <= 32
    for smaller, larger in itertools.pairwise(sizes):
        assert smaller < larger <= max(2 * smaller, smaller + 128)
        assert larger - smaller <= (64 if larger <= 512 else 128)
    assert mixed_sizes(0) == ()


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 4096), st.data())
def test_a_step_with_drafts_has_a_graph(max_rows: int, most_drafts: int, most: int, data: st.DataObject) -> None:
    """Every batch of rows with and without drafts, up to the largest step, fits a shape of at most twice its size."""
    limits = Limits(
        max_rows=max_rows, max_tokens_per_step=most, max_model_len=64, block_size=16, num_blocks=1, vocab_size=10,
        max_draft_tokens=most_drafts,
    )  # fmt: skip
    shapes = draft_shapes(most, limits)
    num_rows = data.draw(st.integers(1, max_rows))
    lengths = [1 + data.draw(st.integers(0, most_drafts)) for _ in range(min(num_rows, 8))]
    tokens, several = sum(lengths), sum(length > 1 for length in lengths)
    if tokens <= most:
        fitting = [
            shape.num_tokens
            for shape in shapes
            if shape.num_tokens >= tokens
            and shape.num_rows >= len(lengths)
            and shape.num_several >= several
            and shape.num_logits >= tokens
        ]
        assert min(fitting) <= max(8, 2 * tokens)
