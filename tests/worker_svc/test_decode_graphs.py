"""Decode steps as captured graphs, on a simulated device: the same tokens, and only changed values are sent."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.driver import Driver, collect, launch, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from tests.examples import examples
from tests.worker_svc.fake_accelerator import FakeAccelerator
from tests.worker_svc.oracle import Oracle, Verdict
from tests.worker_svc.test_oracle import generate_all
from worker_svc.device.state import DeviceState, Staging
from worker_svc.execution.decode_graphs import buckets

SAMPLED = plan_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=1 << 60)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    architecture: str = request.param
    return make_checkpoint(architecture, tmp_path_factory.mktemp(architecture))


def test_tokens_are_the_oracles(checkpoint: Path) -> None:
    """Random chunks, holds, row reuse and recomputation between graphs of several sizes give the oracle's tokens."""
    device = FakeAccelerator()
    engine = make_engine(checkpoint, accelerator=device, block_size=8, max_num_seqs=4, max_num_batched_tokens=96)
    driver = Driver(engine, seed=3)
    prompts = [driver.rng.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 5, 16, 33, 130)]
    oracle = Oracle(checkpoint)

    answers, _ = generate_all(driver, prompts)

    verdict = Verdict()
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.judge(prompt, answer, verdict)
    assert verdict.near_ties == 0
    assert {"replay 1", "replay 2", "replay 4"} <= set(device.log)


def test_two_plans_in_flight_sample_what_one_at_a_time_does(checkpoint: Path) -> None:
    """Greedy and seeded rows that are launched a plan ahead give the CPU executor's tokens."""
    tokens = []
    for device in (None, FakeAccelerator()):
        driver = Driver(make_engine(checkpoint, accelerator=device, max_num_seqs=4))
        assert driver.engine.max_in_flight == (1 if device is None else 2)
        for length, sampling in ((3, plan_pb2.SamplingParams()), (40, SAMPLED), (7, SAMPLED)):
            driver.chunk(driver.admit(list(range(length)), sampling=sampling), length)
        launch(driver.engine, driver.finish_plan())
        for step in range(30):
            if step == 10:
                driver.hold(1)
            if step == 20:
                driver.release(1)
            launch(driver.engine, driver.finish_plan())
            driver.take(collect(driver.engine))
        driver.take(collect(driver.engine))
        tokens.append([driver.rows[row].tokens for row in range(3)])

    assert tokens[0] == tokens[1]


def test_a_steady_step_is_one_replay(checkpoint: Path) -> None:
    """While the same rows decode, a step enqueues its graph; data is sent to the device only for new blocks."""
    device = FakeAccelerator()
    driver = Driver(make_engine(checkpoint, accelerator=device, block_size=8, max_num_seqs=8))
    for length in (8, 9, 10):
        driver.chunk(driver.admit(list(range(length))), length)
    driver.step()
    driver.step()
    sent = Counter[int]()
    send = Staging.send

    def counted(self: Staging, array: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]") -> torch.Tensor:
        sent[array.shape[1]] += 1
        return send(self, array)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "send", counted)
        device.log.clear()
        for _ in range(16):
            driver.step()

    assert [entry for entry in device.log if entry.startswith("replay")] == ["replay 4"] * 16
    assert sent == {1: 6}, "each row crosses two block boundaries in 16 steps"


def test_graphs_can_be_done_without(checkpoint: Path) -> None:
    """`cuda_graphs` off: nothing is captured, steps are enqueued kernel by kernel, tokens stay the same."""
    answers = []
    for graphs in (True, False):
        device = FakeAccelerator()
        driver = Driver(make_engine(checkpoint, accelerator=device, cuda_graphs=graphs))
        answers.append(driver.generate([5, 6, 7], 12))
        assert any(entry.startswith("capture") for entry in device.log) == graphs

    assert answers[0] == answers[1]


def test_a_new_epoch_forgets_what_was_not_sent(checkpoint: Path) -> None:
    """After a plan that broke the contract, the next epoch's rows are computed as if nothing had been."""
    driver = Driver(make_engine(checkpoint, accelerator=FakeAccelerator(), max_num_seqs=2))
    expected = driver.generate([1, 2, 3], 8)
    row = driver.admit([4, 5])
    driver.chunk(row, 2)
    driver.plan.holds += np.array([1], "<i4").tobytes()
    with pytest.raises(Exception, match="hold"):
        driver.step()

    driver.engine.reset()

    assert Driver(driver.engine).generate([1, 2, 3], 8) == expected


@given(st.integers(1, 2000))
def test_every_batch_has_a_graph_of_about_its_size(max_rows: int) -> None:
    """Sizes ascend from 1 and cover every batch up to 512 rows; less than half of the lanes, or 32, are idle."""
    sizes = buckets(max_rows)

    assert sizes[0] == 1
    assert list(sizes) == sorted(set(sizes))
    assert min(max_rows, 512) <= sizes[-1] < min(max_rows, 512) + 32
    for smaller, larger in itertools.pairwise(sizes):
        assert larger <= 2 * smaller
        assert larger - smaller <= 32


def test_staging_memory_is_written_again_only_after_its_copy() -> None:
    """The third array waits for the first one's copy, the fourth for the second one's, for any sizes."""
    device = FakeAccelerator()
    staging = Staging(device)
    arrays = [np.arange(size, dtype=np.int32).reshape(2, -1) for size in (4, 8, 20000, 6)]

    sent = [staging.send(array) for array in arrays]

    assert [tensor.tolist() for tensor in sent] == [array.tolist() for array in arrays]
    first, second = 1, 2
    assert [entry for entry in device.log if not entry.startswith("pass")] == [
        f"record {first}",
        f"record {second}",
        f"wait {first}",
        f"record {first}",
        f"wait {second}",
        f"record {second}",
    ]


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_state_follows_the_host(data: st.DataObject) -> None:
    """Whatever words change between two publications, in any columns, the device has them afterwards."""
    state = DeviceState(FakeAccelerator(), 40)
    columns = [state.column(3, 4), state.column(7), state.column(21)]
    expected = np.zeros(40, np.int32)
    for _ in range(data.draw(st.integers(1, 4))):
        places = data.draw(st.lists(st.integers(0, 39), max_size=20, unique=True))
        for part in (places[:7], places[7:]):
            values = np.array([data.draw(st.integers(-(2**31), 2**31 - 1)) for _ in part], np.int32)
            state.change(np.array(part, np.int64), values)
            expected[part] = values
        state.publish()

    assert np.concatenate([tensor.numpy().ravel() for tensor, _ in columns]).tolist() == expected.tolist()
    assert [first for _, first in columns] == [0, 12, 19]
    with pytest.raises(ValueError, match="41 words"):
        state.column(1)
