"""Two ranks as on GPUs but the GPUs: interpreted kernels, streams of a stand-in, two plans in flight, gloo for NCCL."""

from pathlib import Path
from typing import Any

from checks.driver import Driver, make_engine
from measure.testbed.checkpoints import make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from tests.worker_svc.fake_accelerator import FakeAccelerator
from tests.worker_svc.ranks import LeadingDriver, ranks

SAMPLINGS = (
    plan_pb2.SamplingParams(),
    plan_pb2.SamplingParams(temperature=1.0, top_p=1, seed=5),
    plan_pb2.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=6),
)
PROMPT = [7, 8, 9, 10]


def test_two_plans_in_flight_on_two_ranks(tmp_path: Path) -> None:
    """Rows with and without filters get the same tokens as in one process; followers repeat rank 0's order.

    Every step is a graph, with its collectives.
    """
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    settings: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}

    def begin(driver: Driver) -> None:
        for row in [driver.admit(PROMPT, sampling=sampling) for sampling in SAMPLINGS]:
            driver.chunk(row, len(PROMPT))

    alone = Driver(make_engine(folder, accelerator=FakeAccelerator(), **settings))
    begin(alone)
    for _ in range(4):
        alone.step()
    with ranks(2, one_machine=False) as pair, pair.driver(folder, accelerated=True, **settings) as driver:
        begin(driver)
        device = driver.engine._accelerator
        assert isinstance(device, FakeAccelerator)
        device.log.clear()
        in_two_flights(driver)

    assert len([entry for entry in device.log if entry.startswith("replay")]) == 4
    for row in range(len(SAMPLINGS)):
        assert driver.rows[row].tokens == alone.rows[row].tokens


def in_two_flights(driver: LeadingDriver) -> None:
    """Four steps; from the second on, the next step is launched before the previous one is collected."""
    driver.launch()
    for _ in range(3):
        driver.launch()
        driver.collect()
    driver.collect()
