"""The arena serves every job in every workload reproducibly, and its metrics equal those computed by hand."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measure.policies.arena import Run, Served, run
from measure.policies.campaign import Campaign
from measure.policies.costs import PRESETS, Costs, Work, read_costs
from measure.policies.jobs import Job, Piece, SeenPrefixes
from measure.policies.metrics import meets_targets, metrics, quantile, service_difference
from measure.policies.page import losses
from measure.policies.schedulers import Setup, candidates, make, parse
from measure.policies.workloads import DRAWN, OpenLoop, read, traced
from quire_server.cli.main import main
from records.whatif.load import Member
from records.whatif.rows import Shape
from records.whatif.saved import Service, to_json
from records.whatif.step_times import StepTimes
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from shared.config import ConfigError

_SLOW = Costs(
    name="slow", constant_s=1.0, prefill_s=0.1, decode_s=0.01, context_s=0.001, kv_tokens=4096, max_num_seqs=4
)
_WHOLE_PROMPTS = "quire:fcfs+itl_target_ms=0"
"""Without a target for the length of a step, which the slow device would always miss, no prompt is split."""
_MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 3]},
    {"timestamp": 9000, "input_length": 500, "output_length": 2, "hash_ids": [4]},
]
_AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:05.9799600,31,8\n"
)


def _setup(**changes: Any) -> Setup:
    return replace(Setup(costs=PRESETS["8b-h100"], num_workers=1, in_flight=1), **changes)


def _job(at: float, prompt: int, outputs: int, number: int = 0, **others: Any) -> Job:
    return Job(at=at, prompt=(Piece(2 * number, prompt),), outputs=Piece(2 * number + 1, outputs), **others)


def _run(jobs: Sequence[Job], setup: Setup) -> Run:
    workload = OpenLoop(name="test", load=1.0, jobs=jobs)
    return run(make(parse(_WHOLE_PROMPTS), setup), workload, setup.costs, setup.num_workers)


def _serve(jobs: Sequence[Job], setup: Setup) -> list[Served]:
    return _run(jobs, setup).served


def _campaign(workload: str, **changes: Any) -> Campaign:
    campaign = Campaign(
        workload=workload, loads=(0.8,), seeds=(3,), schedulers=(parse("quire:default"),), setup=_setup(), seconds=4.0
    )
    return replace(campaign, **changes)


def test_the_times_of_a_lone_job_are_those_of_its_steps() -> None:
    """One prompt of 32 tokens takes 1 + 3.2 s; each further token takes 1 + 0.01 s, plus 0.001 s per context token."""
    (served,) = _serve([_job(2.0, 32, 3)], _setup(costs=_SLOW))

    assert served.tokens == pytest.approx([6.2, 6.2 + 1.043, 6.2 + 1.043 + 1.044])
    assert served.ended == served.tokens[-1]


_FAST_DISK = replace(PRESETS["8b-h100"], kv_tokens=2048, host_tokens=1024, disk_tokens=16_384, disk_block_s=20e-6)


def test_a_disk_brings_prefixes_back_that_left_host_memory() -> None:
    """Six prompts of 1,024 tokens do not fit into 3,072 tokens. Most are found on disk later, unless it is slow."""
    jobs = [_job(2.0 * number, 1024, 2, number % 6) for number in range(12)]
    cached, by_tier = {}, {}
    for name, costs in (
        ("none", replace(_FAST_DISK, disk_tokens=0)),
        ("fast", _FAST_DISK),
        ("slow", replace(_FAST_DISK, disk_block_s=1e-3)),
    ):
        found = _run(jobs, _setup(costs=costs))
        cached[name] = sum(each.cached for each in found.served[6:])
        by_tier[name] = metrics(found)["hit_tokens_by_tier"]

    assert cached["none"] < 1024
    assert cached["fast"] > 3 * 1024
    assert cached["slow"] < 2048
    assert by_tier["none"]["disk"] == 0
    assert by_tier["fast"]["disk"] > 3 * 1024
    assert sum(by_tier["fast"].values()) == cached["fast"]


def test_a_run_with_a_disk_is_reproducible() -> None:
    """The jobs of the disk depend on nothing but the load."""
    jobs = [_job(0.3 * number, 1024, 8, number % 6) for number in range(18)]

    first, second = (_serve(jobs, _setup(costs=_FAST_DISK)) for _ in range(2))

    assert [each.tokens for each in first] == [each.tokens for each in second]
    assert sum(each.cached for each in first) > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--disk-tokens=1024"], "add --host-tokens"),
        (["--disk-tokens=-1"], "use 0 or more"),
        (["--disk-bandwidth=3"], "--disk-bandwidth: there is no disk; add --disk-tokens and --host-tokens"),
        (["--host-tokens=1024", "--disk-tokens=1024", "--disk-bandwidth=0"], "use a number above 0"),
    ],
)
def test_disks_that_cannot_be_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "policies", "--workload=agents", *flags]) != 0

    assert message in capsys.readouterr().err


def test_a_job_that_arrives_during_a_step_joins_the_next_one() -> None:
    """With one step in flight the second prompt shares a step with the first job's second token."""
    first, second = _serve([_job(0.0, 32, 3), _job(1.0, 16, 1, 1)], _setup(costs=_SLOW))

    assert first.tokens[0] == pytest.approx(4.2)
    assert second.tokens == pytest.approx([4.2 + 1 + 1.6 + 0.01 + 0.033])
    assert first.tokens[1] == second.tokens[0]


def test_a_prefix_is_found_in_the_cache() -> None:
    """The second job reuses the full blocks of the first job's prompt; an unlimited cache would find no more."""
    shared = Piece(7, 64)
    jobs = [
        Job(at=0.0, prompt=(shared, Piece(8, 10)), outputs=Piece(9, 2)),
        Job(at=100.0, prompt=(shared, Piece(10, 10)), outputs=Piece(11, 2)),
    ]
    first, second = _serve(jobs, _setup(costs=_SLOW))

    assert (first.cached, first.seen) == (0, 0)
    assert (second.cached, second.seen) == (64, 64)


def test_the_tokens_of_a_turn_are_part_of_the_next_prompt() -> None:
    """What a job generated is found in the cache by a job that repeats it."""
    first = Job(at=0.0, prompt=(Piece(1, 32),), outputs=Piece(2, 33))
    second = Job(at=100.0, prompt=(*first.prompt, first.outputs, Piece(3, 16)), outputs=Piece(4, 1))

    assert _serve([first, second], _setup(costs=_SLOW))[1].cached == 64


@pytest.mark.parametrize("workload", [*DRAWN, "agents"])
def test_every_job_of_a_workload_ends_once_with_its_tokens(workload: str) -> None:
    """The loop refuses a lost job and a wrong number of tokens, with two workers and two steps in flight as well."""
    loads = (3,) if workload == "agents" else (0.3,)
    setup = _setup(num_workers=2, in_flight=2)
    campaign = _campaign(workload, loads=loads, sessions=4, setup=setup)
    served = run(make(parse("quire:default"), setup), campaign.make_workload(loads[0], 3), setup.costs, 2).served

    assert len(served) > 10
    assert all(len(each.tokens) == each.job.num_outputs and not each.refusal for each in served)
    assert len({each.job.outputs.name for each in served}) == len(served)


def test_equal_seeds_give_equal_results() -> None:
    """Everything but the measured CPU time follows from the seed."""
    first, second, other = (next(_campaign("bursts", seeds=(seed,)).results()) for seed in (3, 3, 4))
    for each in (first, second, other):
        del each["scheduler_us_per_step"]

    assert first == second
    assert first["ttft_s"] != other["ttft_s"]


def test_metrics_of_a_hand_computed_run() -> None:
    """Throughput, latencies and the share within targets of two jobs."""
    jobs = [_job(0.0, 32, 3, ttft_target_s=4.3, tpot_target_s=2.0), _job(1.0, 16, 1, 1, ttft_target_s=1.0)]
    setup = _setup(costs=_SLOW)
    found = metrics(run(make(parse(_WHOLE_PROMPTS), setup), OpenLoop(name="t", load=1, jobs=jobs), _SLOW))

    # The steps end at 4.2 s, then 2.643 s later with the second prompt, then 1.044 s later.
    assert found["duration_s"] == pytest.approx(7.887)
    assert found["out_tok_per_s"] == pytest.approx(4 / 7.887)
    assert found["ttft_s"]["mean"] == pytest.approx((4.2 + 5.843) / 2)
    assert found["tpot_s"]["p50"] == pytest.approx((2.643 + 1.044) / 2)
    assert found["longest_gap_s"]["p99"] == pytest.approx(2.643)
    assert (found["goodput"], found["requests"], found["steps"]) == (0.5, 2, 3)
    assert found["device_busy_share"] == pytest.approx(1.0)
    assert found["short_prompts"]["requests"] == 2


def test_targets_without_own_ones_depend_on_the_prompt() -> None:
    """A prompt of 8,000 tokens has 2 + 1 s for its first token, and 50 ms for each later one."""
    served = Served(job=_job(0.0, 8000, 3), seen=0, tokens=[2.9, 2.94, 2.99])

    assert meets_targets(served)
    assert not meets_targets(replace(served, tokens=[3.1, 3.14, 3.19]))
    assert not meets_targets(replace(served, tokens=[2.9, 2.95, 3.02]))


def test_quantiles_are_values_of_the_sample() -> None:
    """A quantile of nothing is None."""
    assert quantile([], 0.5) is None
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]


def test_service_counts_only_while_both_tenants_wait() -> None:
    """A prompt token counts 1 and a generated token 2; service without competition counts as fair."""
    one = [Served(job=_job(0.0, 10, 1, tenant="one"), seen=0, tokens=[at], ended=at) for at in (1.0, 2.0, 3.0)]
    other = Served(job=_job(1.5, 10, 1, tenant="two"), seen=0, tokens=[2.5], ended=2.5)

    assert service_difference(one) is None
    # Between 1.5 and 2.5 s both tenants wait. `one` gets 12 tokens at 2.0 s, then `two` gets 12.
    assert service_difference([*one, other]) == 12


def test_a_prefix_is_seen_as_far_as_all_its_pieces_were() -> None:
    """Pieces after the first unknown one do not count."""
    seen = SeenPrefixes()
    a, b, c = Piece(1, 10), Piece(2, 20), Piece(3, 30)

    assert [seen.add(pieces) for pieces in ((a, b), (a, c), (a, b, c), (b,), (a, b, c))] == [0, 10, 30, 0, 60]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_both_formats_of_traces_are_read(tmp_path: Path, ending: str) -> None:
    """A trace is read uncompressed and compressed; equal hashes mean equal tokens."""
    texts = {"mooncake.jsonl": "".join(json.dumps(each) + "\n" for each in _MOONCAKE), "azure.csv": _AZURE}
    for name, text in texts.items():
        (tmp_path / (name + ending)).write_bytes(gzip.compress(text.encode()) if ending else text.encode())
    costs = PRESETS["8b-h100"]
    mooncake = traced("mooncake", read(tmp_path / f"mooncake.jsonl{ending}", 600), 1.0, costs, 1).jobs
    azure = traced("azure", read(tmp_path / f"azure.csv{ending}", 1), 1.0, costs, 1).jobs

    assert sorted((job.num_prompt, job.num_outputs) for job in mooncake) == [(500, 2), (600, 5), (700, 3)]
    assert sum(job.prompt[0] == Piece(1, 512) for job in mooncake) == 2
    assert [(job.at, job.num_prompt, job.num_outputs) for job in azure] == [(0.0, 48, 10)]


def test_a_share_above_one_adds_copies_without_common_prefixes(tmp_path: Path) -> None:
    """A share of 2 doubles the trace; the copies have no piece in common."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in _MOONCAKE))
    jobs = traced("mooncake", read(path, 600), 2.0, PRESETS["8b-h100"], 1).jobs

    assert len(jobs) == 6
    assert len({piece for job in jobs for piece in job.prompt}) == 8
    assert len({piece.tokens()[0] for job in jobs for piece in (*job.prompt, job.outputs)}) == 14


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--workload chess", "unknown workload 'chess'"),
        ("--workload mooncake", "needs a trace"),
        ("--workload vtc --trace x", "has no trace"),
        ("--workload azure --trace /nowhere.csv", "cannot be read"),
        ("--workload vtc --schedulers fcfs", "is not a scheduler"),
        ("--workload vtc --schedulers quire:best", "unknown policy"),
        ("--workload vtc --schedulers quire:fcfs+speed=9", "speed is not a setting"),
        ("--workload vtc --schedulers quire:fcfs+max_num_seqs=many", "is not valid"),
        ("--workload vtc --schedulers quire:fcfs+capacity=none", "unknown value"),
        ("--workload vtc --share 0", "not a list of numbers above 0"),
        ("--workload agents --users a", "not a list of numbers above 0"),
        ("--workload vtc --seconds 0", "too small"),
        ("--workload vtc --in-flight 3", "use 1 or 2"),
        ("--workload vtc --costs tpu", "one of 8b-h100"),
    ],
)
def test_wrong_flags_are_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that cannot be used is named before anything runs."""
    assert main(["bench", "policies", *flags.split()]) == 1
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speed": 1}, "unknown field 'speed'"),
        ({"constant_s": 1}, "missing: prefill_s"),
        ({"constant_s": -1}, "at least 0"),
        ([], "not a JSON object"),
    ],
)
def test_wrong_costs_are_refused(tmp_path: Path, fields: object, message: str) -> None:
    """A file of costs names every field that a device needs, and no other."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(fields))

    with pytest.raises(ValueError, match=message):
        read_costs(str(path))


def test_a_file_of_costs_is_read(tmp_path: Path) -> None:
    """The file's name becomes the device's."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"constant_s": 1, "prefill_s": 0.1, "decode_s": 0, "context_s": 0, "kv_tokens": 99}))

    assert read_costs(str(path)) == Costs(
        name="mine", constant_s=1, prefill_s=0.1, decode_s=0, context_s=0, kv_tokens=99
    )


def test_the_command_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has one object per scheduler, load and seed, with the names of the interface."""
    path = tmp_path / "policies.json"
    html = tmp_path / "policies.html"
    flags = (
        f"--workload agents --users 2,3 --sessions 2 --schedulers quire:fcfs,quire:sjf --seeds 2 --html {html} --json"
    )
    assert main(["bench", "policies", *flags.split(), str(path)]) == 0
    results = json.loads(path.read_text())["results"]

    keys = [(each["scheduler"], each["load"], each["seed"]) for each in results]
    assert keys == [(f"quire:{each}", load, seed) for load in (2, 3) for seed in (1, 2) for each in ("fcfs", "sjf")]
    assert {
        "workload", "scheduler", "load", "seed", "out_tok_per_s", "ttft_s", "later_turn_ttft_s", "tpot_s", "session_s",
        "goodput", "prefix_hit_share", "preemptions", "scheduler_us_per_step",
    } <= set(results[0])  # fmt: skip
    assert capsys.readouterr().out.count("quire:sjf") == 4
    assert html.read_text().count("quire:sjf") == 2


def test_results_report_the_accuracy_of_forecasts() -> None:
    """The shares within the forecast quantiles are given for each kind, and those of p90 are not smaller."""
    (result,) = _campaign("bursts").results()
    assert set(result["forecasts"]) == {"wait", "first_token", "end"}
    for each in result["forecasts"].values():
        assert 0 < each["count"] <= result["requests"]
        assert 0 <= each["within_p50"] <= each["within_p90"] <= 1


def test_the_busy_share_while_jobs_arrive_excludes_the_end() -> None:
    """A device that computes from the first to the last arrival, and then for longer, is busy in all that time."""
    setup = _setup(costs=_SLOW)
    workload = OpenLoop(name="test", load=1.0, jobs=[_job(0.0, 32, 3), _job(4.0, 16, 1, 1)])
    outcome = run(make(parse(_WHOLE_PROMPTS), setup), workload, setup.costs)
    assert outcome.arrivals_s == 4.0
    assert outcome.arrivals_busy_s == pytest.approx(4.0)
    assert outcome.busy_s > 6.0


def test_the_page_lists_what_a_peer_does_better() -> None:
    """A loss counts if the best of Quire's policies is worse than the best peer by more than 2 %."""
    fcfs, sjf = next(_campaign("bursts").results()), next(_campaign("bursts").results())
    peer = {**fcfs, "goodput": 0.0, "out_tok_per_s": 1.01 * fcfs["out_tok_per_s"], "prefix_hit_share": 0.5}
    found = dict(losses({"quire:fcfs": [fcfs], "quire:sjf": [sjf], "vllm:fcfs": [peer]}))

    assert set(found) == {"cache hits %"}


def test_the_policy_best_stands_for_a_grid_of_settings() -> None:
    """Priorities are tried only if jobs have some; explicit settings are part of every try."""
    best = parse("vllm:best+watermark=0.01")
    tried = candidates(best, with_priorities=True)

    assert len(set(tried)) == 24
    assert {each.policy for each in tried} == {"fcfs", "priority"}
    assert all(each.name.endswith("+watermark=0.01") for each in tried)
    assert len(candidates(best, with_priorities=False)) == 12
    assert candidates(parse("quire:fcfs"), with_priorities=True) == [parse("quire:fcfs")]


def test_the_learned_step_times_of_a_service_are_costs(tmp_path: Path) -> None:
    """The file from `quire replay --learn-step-times` contains a worker's costs and sizes; a damaged file is named."""
    model = ev.ModelFacts(
        name="m", architecture="x", fingerprint="f", max_model_len=512, vocab_size=100, dtype="bf16", eos_token_ids=(2,)
    )
    hello = ev.WorkerHello(
        worker=b"w", worker_id="w", model=model, block_size=4, num_blocks=100, max_rows=8, max_tokens_per_step=64
    )
    times = StepTimes(
        constant_s=0.01, decode_s=0.002, prefill_s=0.003, context_s=1e-6, prefill_context_s=1e-7, block_copy_s=0,
        link_s=0.001,
    )  # fmt: skip
    service = Service(config=CoreConfig(), members=[Member(hello=hello)], times=times)
    path = tmp_path / "service.json"
    path.write_text(to_json(service))
    costs = read_costs(str(path))

    assert costs.seconds(Work(10, 2, 30, 55)) == pytest.approx(times.seconds(Shape(2, 10, 30, 55)))
    assert (costs.kv_tokens, costs.max_num_seqs, costs.max_num_batched_tokens) == (400, 8, 64)
    path.write_text(to_json(service).replace("constant_s", "konstant_s"))
    with pytest.raises(ConfigError, match="--costs"):
        read_costs(str(path))


def test_copies_of_a_gpu_overlap_with_its_steps() -> None:
    """Copies in both directions overlap with the step. The step waits only for copies of blocks that it uses."""
    gpu = PRESETS["8b-h100"]
    computing, block_s = Work(0, 8, 8000, 0), gpu.block_copy_s
    alone_s = gpu.seconds(computing)

    assert gpu.seconds(computing._replace(copied_out=50, copied_in=60)) == alone_s
    assert gpu.seconds(computing._replace(copied_out=50, awaited=20)) == pytest.approx(alone_s + 20 * block_s)
    assert gpu.seconds(computing._replace(copied_out=500, copied_in=400)) == pytest.approx(500 * block_s)
    cpu = replace(gpu, copies_overlap=False)
    assert cpu.seconds(computing._replace(copied_out=5, copied_in=6)) == pytest.approx(alone_s + 11 * block_s)
