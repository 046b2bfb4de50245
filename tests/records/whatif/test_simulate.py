"""What-if replay: the simulation of a record reproduces it, and serves every request once."""

import dataclasses
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checks.sim.scenario import draw
from records.reader import read
from records.replay import replay
from records.whatif.answer import Case, compare, from_record, read_service, save
from records.whatif.arrivals import WhatIfError, read_load
from records.whatif.figures import Figures
from records.whatif.load import Arrival, Member
from records.whatif.page import as_json, as_text
from records.whatif.rows import Shape
from records.whatif.simulate import Simulated, SimulationError, simulate
from records.whatif.step_times import StepTimes, StepTimesError
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import BatchingLimits, CoreConfig
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.scheduler import Scheduler
from shared.config import ConfigError
from shared.prefix_keys import KEY_BYTES
from shared.request_spec import Pooling, RequestSpec
from tests.records.whatif.deterministic import Memory, record_run
from tests.scheduler_svc.recording import record_scenario

DRAFTING = CoreConfig(max_num_seqs=8, max_num_batched_tokens=64)
TIMES = StepTimes(
    constant_s=0.01, decode_s=0.0001, prefill_s=0.0001, context_s=0.0, prefill_context_s=0.0, block_copy_s=0.001,
    link_s=0.001, largest=Shape(1000, 10_000, 0, 0),
)  # fmt: skip
MODEL = ev.ModelFacts(
    name="m", architecture="x", fingerprint="f", max_model_len=512, vocab_size=100, dtype="bf16", eos_token_ids=(2,),
    hidden_size=4,
)  # fmt: skip
WORKER = Member(
    hello=ev.WorkerHello(
        worker=b"w", worker_id="w", model=MODEL, block_size=4, num_blocks=200, max_rows=8, max_tokens_per_step=64,
        num_host_blocks=50,
    )
)  # fmt: skip


def _arrival(number: int, *, outputs: int = 10, end: EndReason = EndReason.STOP, at: float | None = None) -> Arrival:
    spec = RequestSpec(f"r{number}", 8, 40, pooling=Pooling.LAST if end is EndReason.EMBEDDED else Pooling.NONE)
    if end is EndReason.LENGTH:
        spec = spec._replace(max_tokens=outputs)
    return Arrival(at=0.01 * number if at is None else at, spec=spec, num_tokens=8, num_outputs=outputs, end=end)


def _simulate(arrivals: list[Arrival], *, workers: int = 1, config: CoreConfig | None = None) -> Simulated:
    return simulate(
        arrivals, [WORKER] * workers, config or CoreConfig(max_num_seqs=8), TIMES, make_core=_CheckedScheduler
    )


class _CheckedScheduler(Scheduler):
    """A core that checks its invariants at every hundredth event."""

    def __init__(self, config: CoreConfig, incarnation: int, facts: TokenFacts) -> None:
        super().__init__(config, incarnation, facts)
        self._num_events = 0

    def handle(self, event: ev.Event, now: float) -> list:  # type: ignore[type-arg]
        self._num_events += 1
        if self._num_events % 100 == 0:
            self.validate()
        return super().handle(event, now)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "config",
    [
        CoreConfig(max_num_seqs=8, max_num_batched_tokens=64),
        CoreConfig(max_num_seqs=8, max_num_batched_tokens=64, policy="sjf", prefix_cache="radix"),
        CoreConfig(max_num_seqs=4, max_num_batched_tokens=64, batching=BatchingLimits(mode="static", max_batch_size=4)),
        CoreConfig(max_num_seqs=8, max_num_batched_tokens=32, max_plans_in_flight=1, itl_target_s=0.01),
    ],
    ids=["continuous", "sjf", "static", "one plan in flight"],
)
@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.release)])
def test_a_record_is_reproduced_with_its_own_settings(config: CoreConfig, workers: int, tmp_path: Path) -> None:
    """Of a run with deterministic workers, throughput is within 5 % and the mean TTFT within 10 %."""
    record_run(tmp_path, config, num_workers=workers, num_requests=250)

    found = compare(from_record(tmp_path), [])

    assert found.recorded is not None
    recorded, simulated = found.recorded, found.simulated.figures
    assert recorded.requests == simulated.requests == 250
    assert simulated.requests_per_s == pytest.approx(recorded.requests_per_s, rel=0.05)
    assert simulated.output_tokens_per_s == pytest.approx(recorded.output_tokens_per_s, rel=0.05)
    assert simulated.ttft.mean == pytest.approx(recorded.ttft.mean, rel=0.10)
    assert simulated.prefix_hit_rate == pytest.approx(recorded.prefix_hit_rate, abs=0.05)


def test_a_change_is_predicted(tmp_path: Path) -> None:
    """A one-worker record predicts the results of two workers with half the rows."""
    before = CoreConfig(max_num_seqs=8, max_num_batched_tokens=64)
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    record_run(tmp_path / "before", before, num_workers=1, num_requests=250)
    record_run(tmp_path / "after", replace(before, max_num_seqs=4, policy="sjf"), num_workers=2, num_requests=250)
    measured = read_load(read(tmp_path / "after")).figures

    found = compare(from_record(tmp_path / "before"), ["max_num_seqs=4", "policy=sjf"], workers=2)

    assert found.recorded is not None
    assert found.changed is not None
    predicted = found.changed.figures
    assert abs(found.recorded.ttft.mean / measured.ttft.mean - 1) > 0.5
    assert predicted.requests_per_s == pytest.approx(measured.requests_per_s, rel=0.05)
    assert predicted.ttft.mean == pytest.approx(measured.ttft.mean, rel=0.10)


_SMALL = Memory(num_blocks=120, num_host_blocks=100)
"""Device and host memory that hold a part of the beginnings of prompts."""
_WITH_DISK = replace(_SMALL, num_disk_blocks=4000)
_BEGINNINGS: dict[str, Any] = {"num_workers": 1, "num_requests": 160, "num_families": 60, "rate": 20.0}


def test_a_record_with_a_disk_is_replayed_and_reproduced(tmp_path: Path) -> None:
    """The replay makes equal plans. In the simulation, as many tokens are found in the cache, within 3 points."""
    record_run(tmp_path, DRAFTING, memory=_WITH_DISK, **_BEGINNINGS)
    load = read_load(read(tmp_path))

    replayed, found = replay(read(tmp_path)), compare(from_record(tmp_path), [])

    assert replayed.difference is None
    assert sum(each.num_blocks for each in load.disk_samples if each.reads) > 100
    assert found.simulated.figures.prefix_hit_rate == pytest.approx(load.figures.prefix_hit_rate, abs=0.03)
    assert found.simulated.figures.ttft.mean == pytest.approx(load.figures.ttft.mean, rel=0.10)
    assert found.simulated.figures.requests_per_s == pytest.approx(load.figures.requests_per_s, rel=0.05)


def test_the_times_of_a_disk_are_learned(tmp_path: Path) -> None:
    """The times per block and the latency are those of the recorded disk."""
    record_run(tmp_path, DRAFTING, memory=_WITH_DISK, **_BEGINNINGS)

    times = from_record(tmp_path).service.times.disk

    assert times is not None
    assert times.read_s == pytest.approx(0.0002)
    assert times.write_s == pytest.approx(0.0003)
    assert times.latency_s == pytest.approx(0.0004)


def test_a_disk_is_predicted(tmp_path: Path) -> None:
    """From a record without disk, the hits with a disk of a certain size are predicted, and the reverse."""
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    record_run(tmp_path / "without", DRAFTING, memory=_SMALL, **_BEGINNINGS)
    record_run(tmp_path / "with", DRAFTING, memory=_WITH_DISK, **_BEGINNINGS)
    without, with_disk = (read_load(read(tmp_path / name)).figures for name in ("without", "with"))
    assert with_disk.prefix_hit_rate > without.prefix_hit_rate + 0.05

    added = compare(from_record(tmp_path / "without"), ["disk_cache_bytes=32MiB"])
    removed = compare(from_record(tmp_path / "with"), ["disk_cache_bytes=0"])

    assert added.changed is not None
    assert removed.changed is not None
    assert added.changed.figures.prefix_hit_rate == pytest.approx(with_disk.prefix_hit_rate, abs=0.03)
    assert removed.changed.figures.prefix_hit_rate == pytest.approx(without.prefix_hit_rate, abs=0.03)
    assert any("3 GB/s are assumed" in note for note in added.notes)


@pytest.mark.parametrize(
    ("memory", "size", "message"),
    [
        (Memory(), "1GiB", "use a record of workers with --host-cache"),
        (replace(_SMALL, block_bytes=0), "1GiB", "does not contain the size of a block"),
        (_SMALL, "1KiB", "too little for one block"),
    ],
)
def test_a_disk_that_the_worker_cannot_have_is_refused(memory: Memory, size: str, message: str, tmp_path: Path) -> None:
    record_run(tmp_path, DRAFTING, num_workers=1, num_requests=20, memory=memory)

    with pytest.raises(ConfigError, match=message):
        compare(from_record(tmp_path), [f"disk_cache_bytes={size}"])


def test_a_disk_is_refused_for_workers_with_windows(tmp_path: Path) -> None:
    """They use host memory, but only for preempted requests, so a disk would silently have no effect."""
    record_run(tmp_path, DRAFTING, num_workers=1, num_requests=20, memory=_SMALL)
    case = from_record(tmp_path)
    members = [replace(each, hello=replace(each.hello, num_kv_groups=2, window=8)) for each in case.service.members]

    with pytest.raises(ConfigError, match="KV groups with windows"):
        compare(replace(case, service=replace(case.service, members=members)), ["disk_cache_bytes=1GiB"])


@pytest.mark.release
def test_runs_of_the_simulator_are_reproduced(tmp_path: Path) -> None:
    """Throughput is within 10 % and the mean TTFT within 15 % over six runs, although steps scatter by half.

    Runs in which a request was refused do not count: which one is refused depends on single steps.
    """
    ratios = []
    for seed in range(1, 25):
        scenario = draw(seed, faults=False)
        traffic = replace(scenario.traffic, credit_tokens=0, grammars=0.0, identified=0.0, deadlines=0.0)
        traffic = replace(traffic, giants=0.0, embeds=0.0, models=0.0)
        config = replace(scenario.config, max_queued_requests=4096, max_queued_tokens=1 << 24, tenant_limits={})
        scenario = replace(scenario, pace=replace(scenario.pace, turn=0.0), traffic=traffic, config=config)
        folder = tmp_path / str(seed)
        folder.mkdir()
        result, _ = record_scenario(folder, scenario, 3000)
        assert result.failure is None
        found = compare(from_record(folder), [])
        assert found.recorded is not None
        recorded, simulated = found.recorded, found.simulated.figures
        if recorded.requests > 50 and not recorded.others:
            assert simulated.requests_per_s == pytest.approx(recorded.requests_per_s, rel=0.1), seed
            ratios.append(simulated.ttft.mean / recorded.ttft.mean)
            if len(ratios) == 6:
                break

    assert len(ratios) == 6
    assert statistics.geometric_mean(ratios) == pytest.approx(1.0, abs=0.15), ratios


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Case]:
    """Recorded cases with at most this many drafts per row and step; 0 for no speculation."""
    cases = {}
    for most in (0, 2, 8):
        folder = tmp_path_factory.mktemp(f"drafts-{most}")
        record_run(folder, DRAFTING, num_workers=1, num_requests=120, max_drafts=most, rate=20.0)
        cases[most] = from_record(folder)
    return cases


def _assert_close(predicted: Figures, measured: Figures) -> None:
    assert predicted.requests == measured.requests
    assert predicted.output_tokens_per_s == pytest.approx(measured.output_tokens_per_s, rel=0.05)
    assert predicted.ttft.mean == pytest.approx(measured.ttft.mean, rel=0.10)
    assert predicted.e2e.mean == pytest.approx(measured.e2e.mean, rel=0.05)
    assert predicted.draft_tokens == pytest.approx(measured.draft_tokens, rel=0.1)
    assert predicted.accepted_draft_tokens == pytest.approx(measured.accepted_draft_tokens, rel=0.1)


def test_a_record_with_drafts_is_reproduced(drafting: dict[int, Case]) -> None:
    """Latencies, drafts and accepted drafts match the record; the page shows them."""
    for most in (2, 8):
        found = compare(drafting[most], [])
        assert found.recorded is not None
        assert found.recorded.accepted_draft_tokens > 500
        _assert_close(found.simulated.figures, found.recorded)
        assert "drafts accepted, %" in as_text(found)


@pytest.mark.parametrize(
    ("recorded", "asked", "settings"),
    [
        (8, 0, ["speculation=off"]),
        (2, 0, ["speculation=off"]),
        (8, 2, ["speculative_tokens=2"]),
        (2, 8, ["speculative-tokens=8"]),
    ],
)
def test_a_change_of_speculation_is_predicted(
    recorded: int, asked: int, settings: list[str], drafting: dict[int, Case]
) -> None:
    """Fewer drafts, more drafts, and none are predicted from a record with drafts."""
    measured, other = drafting[asked].recorded, drafting[recorded].recorded
    assert measured is not None
    assert other is not None
    assert abs(other.e2e.mean / measured.e2e.mean - 1) > 0.08

    found = compare(drafting[recorded], settings)

    assert found.changed is not None
    _assert_close(found.changed.figures, measured)


def test_speculation_is_turned_on_with_the_drafts_of_another_record(drafting: dict[int, Case], tmp_path: Path) -> None:
    """With the step times and the acceptance of another record, the gain is predicted; other requests gain as much."""
    off, on, file = drafting[0], drafting[8], tmp_path / "service.json"
    save(on.service, file)
    assert read_service(file).acceptance == on.service.acceptance
    service = replace(off.service, times=on.service.times, acceptance=read_service(file).acceptance)

    found = compare(replace(off, service=service), ["speculative_tokens=8"])

    assert found.changed is not None
    assert off.recorded is not None
    assert on.recorded is not None
    assert found.simulated.figures.e2e.mean == pytest.approx(off.recorded.e2e.mean, rel=0.05)
    assert found.changed.figures.e2e.mean == pytest.approx(on.recorded.e2e.mean, rel=0.15)


def test_speculation_without_known_drafts_is_refused(drafting: dict[int, Case]) -> None:
    """A record without drafts says nothing about them, and no record says how they were proposed."""
    with pytest.raises(ConfigError, match="use a record of workers with --speculation"):
        compare(drafting[0], ["speculative_tokens=8"])
    with pytest.raises(ConfigError, match="does not show how its drafts were proposed"):
        compare(drafting[8], ["speculation=ngram"])
    unknown = replace(drafting[8], service=replace(drafting[8].service, acceptance=None))
    assert "simulated without drafts" in as_text(compare(unknown, []))


def test_every_way_to_end_is_simulated() -> None:
    """Requests end as in the record, after as many tokens; embeddings generate none."""
    ends = [EndReason.STOP, EndReason.LENGTH, EndReason.STOP_STRING, EndReason.CANCELLED, EndReason.EMBEDDED]
    arrivals = [_arrival(number, end=end) for number, end in enumerate(ends)]
    early = replace(_arrival(9, end=EndReason.CANCELLED), at=0.05, cancelled_after=0.0)

    figures = _simulate([*arrivals, early]).figures

    assert figures.requests == 4
    assert figures.others == {"cancelled": 2}
    # Four requests generate ten tokens each. Tokens that a cancelled request gets before the cancellation arrives count
    # too.
    assert 40 <= round(figures.output_tokens_per_s * figures.duration_s) <= 42


def test_more_workers_shorten_the_wait() -> None:
    """Sixty simultaneous requests wait for one worker with eight rows, but not for ten such workers."""
    arrivals = [_arrival(number, at=0.0) for number in range(60)]

    few, many = _simulate(arrivals).figures, _simulate(arrivals, workers=10).figures

    assert few.requests == many.requests == 60
    assert few.ttft.p99 > 5 * many.ttft.p99
    assert many.requests_per_s > 3 * few.requests_per_s


def test_idle_workers_cost_no_steps() -> None:
    """Two hundred workers make the same steps as ten when ten have work."""
    arrivals = [_arrival(number, at=1.0 * number) for number in range(20)]

    many, few = _simulate(arrivals, workers=200).figures, _simulate(arrivals, workers=10).figures

    assert replace(many, busy_share=0.0) == replace(few, busy_share=0.0)
    assert many.busy_share == pytest.approx(few.busy_share / 20)


def test_shared_prefixes_are_found_again() -> None:
    """Requests with equal block keys hit the prefix cache, and a conversation finds its last response's blocks."""
    keys = [bytes([number]) * KEY_BYTES for number in range(1, 6)]
    first = replace(_arrival(0, outputs=9), keys=b"".join(keys[:2]), following_keys=b"".join(keys[2:4]), block_size=4)
    spec = RequestSpec("r1", 20, 40)
    later = Arrival(
        at=5.0, spec=spec, num_tokens=20, num_outputs=5, end=EndReason.STOP, keys=b"".join(keys), block_size=4
    )
    other = replace(later, at=5.0, keys=b"".join(reversed(keys)))

    assert _simulate([first, later]).figures.prefix_hit_rate == pytest.approx(16 / 28)
    assert _simulate([first, other]).figures.prefix_hit_rate == 0.0


def test_scarce_memory_preempts_and_swaps() -> None:
    """With room for few sequences, requests are preempted; all are served nevertheless."""
    small = replace(WORKER, hello=dataclasses.replace(WORKER.hello, num_blocks=30))
    arrivals = [_arrival(number, outputs=30, at=0.0) for number in range(12)]

    figures = simulate(arrivals, [small], CoreConfig(max_num_seqs=8), TIMES, make_core=_CheckedScheduler).figures

    assert figures.requests == 12
    assert figures.preemptions > 0


def test_a_worker_that_was_lost_is_lost_again() -> None:
    """A worker leaves and another joins at the recorded times; the requests continue."""
    members = [replace(WORKER, lost=0.1), replace(WORKER, joined=0.5)]
    arrivals = [_arrival(number, outputs=30, at=0.0) for number in range(4)]

    figures = simulate(arrivals, members, CoreConfig(max_num_seqs=8), TIMES).figures

    assert figures.requests == 4
    assert figures.e2e.p50 > 0.5


def test_a_long_step_loses_no_worker() -> None:
    """One step in 100 takes 4 s instead of 10 ms, as if the machine stopped. No worker is given up."""
    lost = []

    class Watched(Scheduler):
        def _give_up(self, worker: Any, reason: str, now: float, *, fatal: bool) -> None:
            lost.append(reason)
            super()._give_up(worker, reason, now, fatal=fatal)

    times = replace(TIMES, spreads={"decode": ((0.0, (1.0,) * 99 + (400.0,)),), "prefill": ((0.0, (1.0,)),)})
    arrivals = [_arrival(number, outputs=40) for number in range(60)]

    found = simulate(arrivals, [WORKER], CoreConfig(max_num_seqs=8), times, make_core=Watched)

    assert found.figures.duration_s > 6
    assert lost == []


def test_the_same_seed_gives_the_same_figures() -> None:
    """A simulation depends on its arguments only; another seed scatters the steps differently."""
    scattered = replace(TIMES, spreads={"decode": ((0.0, (0.5, 1.0, 1.5)),)})
    arrivals = [_arrival(number) for number in range(30)]

    def run(seed: int) -> object:
        return simulate(arrivals, [WORKER], CoreConfig(max_num_seqs=8), scattered, seed=seed).figures

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_worker_that_cannot_serve_is_an_error() -> None:
    """Limits that the core refuses are reported with its reason."""
    few_tokens = replace(WORKER, hello=dataclasses.replace(WORKER.hello, max_tokens_per_step=4))

    with pytest.raises(SimulationError, match="max_num_batched_tokens"):
        simulate([_arrival(0)], [few_tokens], CoreConfig(max_num_seqs=8), TIMES)


def test_the_page_names_changes_and_caveats(tmp_path: Path) -> None:
    """The table has the record, its simulation and the change, with their errors; JSON has the same numbers."""
    record_run(tmp_path, CoreConfig(max_num_seqs=8, max_num_batched_tokens=64), num_workers=1, num_requests=30)

    found = compare(from_record(tmp_path), ["policy=sjf"], workers=3)
    text, values = as_text(found), as_json(found)

    assert "recorded   simulated       error     changed      change" in text
    assert "policy=sjf, 3 workers instead of 1" in text
    assert "steps per second of one core" in text
    assert values["workers"] == {"recorded": 1, "changed": 3}
    with pytest.raises(ConfigError, match="use 1 to 1000"):
        compare(from_record(tmp_path), [], workers=1001)


def test_a_record_without_requests_is_an_error(tmp_path: Path) -> None:
    """A record of an unused service cannot be simulated, and the message says what to do."""
    with pytest.raises(WhatIfError, match="record the service while it is in use"):
        read_load(read(tmp_path))


def test_step_times_of_a_record_serve_a_trace(tmp_path: Path) -> None:
    """The file that --learn-step-times writes is enough to simulate a trace, whose prompts share blocks."""
    (tmp_path / "record").mkdir()
    config = CoreConfig(max_num_seqs=8, max_num_batched_tokens=64)
    record_run(tmp_path / "record", config, num_workers=1, num_requests=30)
    case = from_record(tmp_path / "record")
    file, trace = tmp_path / "service.json", tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * number, "input_length": 450, "output_length": 20, "hash_ids": [7 + number // 4]}
        for number in range(8)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    save(case.service, file)
    found = _replay_command(trace, "--step-times", str(file), "--workers", "1", "--json")

    assert read_service(file).times == replace(case.service.times, pace=())
    assert read_service(file).config == case.service.config
    values = json.loads(found)
    assert values["recorded"] is None
    assert values["changed"]["requests"] == 8
    # Two of the eight prompts are new. The last token of a prompt is always computed.
    assert values["changed"]["prefix_hit_rate"] == pytest.approx(6 / 8, abs=0.01)


def _replay_command(*arguments: object) -> str:
    command = [sys.executable, "-m", "quire_server.cli.main", "replay", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_a_service_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A file that is not one of step times is refused with the remedy."""
    file = tmp_path / "other.json"
    for text in (b"{}", b"[]", b"no JSON", b"\xff\xfe\x00"):
        file.write_bytes(text)
        with pytest.raises(StepTimesError, match="--learn-step-times"):
            read_service(file)
