"""vLLM's scheduler in the arena: the same loop and the same accounting of steps as for Quire's core."""

from dataclasses import replace
from pathlib import Path

import pytest

from measure.policies.arena import Served, run
from measure.policies.campaign import Campaign
from measure.policies.costs import PRESETS
from measure.policies.jobs import Job, Piece
from measure.policies.routers import ROUTERS
from measure.policies.schedulers import VLLM_PYTHON, Setup, make, parse
from measure.policies.workloads import OpenLoop
from quire_server.cli.main import main

needs_vllm = pytest.mark.skipif(
    not (VLLM_PYTHON.parents[1] / ".installed").exists(), reason="vLLM is not installed; run make arena-vllm"
)


def _job(at: float, prompt: tuple[Piece, ...], outputs: int, number: int) -> Job:
    return Job(at=at, prompt=prompt, outputs=Piece(1000 + number, outputs))


def _serve(scheduler: str, jobs: list[Job], setup: Setup) -> list[Served]:
    engine = make(parse(scheduler), setup)
    try:
        return run(engine, OpenLoop(name="test", load=1.0, jobs=jobs), setup.costs, setup.num_workers).served
    finally:
        engine.close()


@needs_vllm
def test_both_schedulers_are_charged_the_same_for_the_same_steps() -> None:
    """While nothing is left to decide, every token of every job comes at the same time, with the same cache hits."""
    shared = Piece(1, 64)
    jobs = [
        _job(0.0, (shared, Piece(2, 10)), 4, 0),
        _job(0.001, (Piece(3, 16),), 2, 1),
        _job(1.0, (shared, Piece(4, 20)), 3, 2),
    ]
    setup = Setup(costs=PRESETS["8b-h100"], num_workers=1, in_flight=1)
    quire, vllm = (_serve(scheduler, jobs, setup) for scheduler in ("quire:fcfs", "vllm:fcfs"))

    assert [each.tokens for each in quire] == [pytest.approx(each.tokens) for each in vllm]
    assert [each.cached for each in quire] == [each.cached for each in vllm] == [0, 0, 64]


@needs_vllm
def test_vllm_serves_every_job_of_two_workers_with_two_steps_in_flight() -> None:
    """The loop refuses a lost job and a wrong number of tokens; a small KV cache makes vLLM preempt."""
    costs = replace(PRESETS["8b-h100"], kv_tokens=40_000)
    setup = Setup(costs=costs, num_workers=2, in_flight=2)
    scheduler = parse("vllm:priority+max_num_batched_tokens=2048")
    campaign = Campaign(
        workload="priorities", loads=(2.0,), seeds=(1,), schedulers=(scheduler,), setup=setup, seconds=3.0
    )
    (result,) = campaign.results()

    assert result["version"] == "vLLM 0.32.0"
    assert result["requests"] > 50
    assert result["refused"] == 0
    assert result["preemptions"] > 0


@needs_vllm
@pytest.mark.parametrize("in_flight", [1, 2])
def test_host_memory_brings_evicted_prefixes_back(in_flight: int) -> None:
    """With vLLM's connector, a prefix that others evicted is copied back; the copy delays only its request."""
    prompt = Piece(1, 1024)
    jobs = [
        _job(0.0, (prompt,), 4, 0),
        _job(1.0, (Piece(2, 1900),), 4, 1),
        _job(2.0, (prompt, Piece(3, 16)), 4, 2),
        _job(2.0, (Piece(4, 16),), 4, 3),
    ]
    served = []
    for host_tokens in (0, 4096):
        costs = replace(PRESETS["8b-h100"], kv_tokens=2048, host_tokens=host_tokens)
        served.append(_serve("vllm:fcfs", jobs, Setup(costs=costs, num_workers=1, in_flight=in_flight)))
    without, with_host = served

    assert without[2].cached < 256
    assert with_host[2].cached == 1024
    copy_s = 1024 / 16 * PRESETS["8b-h100"].block_copy_s
    assert with_host[2].tokens[0] > 2.0 + copy_s / 1024 * (1024 - 256)
    assert with_host[3].tokens[0] < with_host[2].tokens[0]


@needs_vllm
def test_a_setting_that_vllm_does_not_know_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the setting."""
    flags = "--workload vtc --seconds 1 --schedulers vllm:fcfs+max_num_partial_prefills=2"
    assert main(["bench", "policies", *flags.split()]) == 1
    errors = capsys.readouterr().err

    assert "max_num_partial_prefills" in errors
    assert errors.count("\n") == 1


def test_without_the_environment_the_command_says_how_to_make_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing runs before every scheduler is known to be there."""
    flags = f"--workload vtc --schedulers quire:fcfs,vllm:fcfs --vllm-python {tmp_path / 'python'}"
    assert main(["bench", "policies", *flags.split()]) == 1
    errors = capsys.readouterr().err

    assert "run make arena-vllm" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("router", "workers"), [("round-robin", [0, 1, 2, 0]), ("least-load", [0, 1, 2, 1])], ids=["round-robin", "least"]
)
def test_routers_know_only_what_a_load_balancer_knows(router: str, workers: list[int]) -> None:
    """Round robin looks at nothing; least load counts the live jobs."""
    chooses = ROUTERS[router](3)
    jobs = [_job(0.0, (Piece(number, 16),), 1, number) for number in range(4)]
    found = [chooses.choose(job) for job in jobs[:3]]
    chooses.ended(1)

    assert [*found, chooses.choose(jobs[3])] == workers


def test_prefix_hash_keeps_a_session_on_one_worker() -> None:
    """What follows the first 4,096 tokens does not matter."""
    chooses = ROUTERS["prefix-hash"](16)
    first = (Piece(1, 2048), Piece(2, 2048))
    same = {chooses.choose(_job(0.0, (*first, Piece(number, 99)), 1, number)) for number in range(9)}
    others = {chooses.choose(_job(0.0, (Piece(1, 2048), Piece(number, 2048)), 1, number)) for number in range(9)}

    assert len(same) == 1
    assert len(others) > 1
