"""A replay of a record from other code checks promises: they hold, and a core that breaks one is detected."""

from pathlib import Path

import pytest

from checks.planted import BUGS, PlantedBug
from measure.commands.replay import configure, run
from quire_server.cli._parser import OneLineParser
from records.rules.replayed import check
from records.whatif.answer import from_record
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.workers import plan_timing
from tests.records.whatif.deterministic import Memory, record_run
from tests.scheduler_svc import recording

LITTLE_MEMORY = CoreConfig(max_num_seqs=8, max_num_batched_tokens=64, max_tokens_in_paged_kv_cache=400, policy="sjf")


@pytest.mark.parametrize(
    "config",
    [
        CoreConfig(max_num_seqs=8, max_num_batched_tokens=64),
        CoreConfig(max_num_seqs=8, max_num_batched_tokens=32, policy="priority", prefix_cache="radix"),
        LITTLE_MEMORY,
    ],
    ids=["defaults", "radix", "little memory"],
)
def test_the_promises_hold(config: CoreConfig, tmp_path: Path) -> None:
    """All recorded requests are served again; every plan follows the rules, even with preemptions."""
    record_run(tmp_path, config, num_workers=1, num_requests=60)
    case = from_record(tmp_path)

    kept = check(case.arrivals, case.service)

    assert kept.requests == 60
    assert kept.tokens == sum(arrival.num_outputs for arrival in case.arrivals)
    assert kept.plans > 100


def test_the_promises_hold_with_drafts(tmp_path: Path) -> None:
    """Steps with drafts keep the rules, also while memory is short."""
    record_run(tmp_path, LITTLE_MEMORY, num_workers=1, num_requests=60, max_drafts=8, rate=20.0)
    case = from_record(tmp_path)
    assert case.recorded is not None
    assert case.recorded.accepted_draft_tokens > 100

    kept = check(case.arrivals, case.service)

    assert kept.tokens == sum(arrival.num_outputs for arrival in case.arrivals)


def test_the_promises_hold_with_a_disk(tmp_path: Path) -> None:
    """Blocks that were read from disk have the content of their tokens, and no step uses the blocks of a job."""
    memory = Memory(num_blocks=120, num_host_blocks=100, num_disk_blocks=4000)
    config = CoreConfig(max_num_seqs=8, max_num_batched_tokens=64)
    record_run(tmp_path, config, num_workers=1, num_requests=120, num_families=40, rate=20.0, memory=memory)
    case = from_record(tmp_path)

    kept = check(case.arrivals, case.service)

    assert kept.tokens == sum(arrival.num_outputs for arrival in case.arrivals)
    assert kept.read_blocks > 50


@pytest.mark.parametrize(
    "bug",
    [each for each in BUGS if each.name in ("leaked_block", "freed_too_early", "budget_off_by_one", "lost_token")],
    ids=lambda bug: bug.name,
)
def test_a_broken_promise_is_found(bug: PlantedBug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the core, as newer code may have it, breaks a promise for the requests of a sound record."""
    record_run(tmp_path, LITTLE_MEMORY, num_workers=1, num_requests=30)
    case = from_record(tmp_path)
    bug.plant(monkeypatch)

    with pytest.raises(AssertionError):
        check(case.arrivals, case.service)


def test_a_record_of_other_code_is_checked_by_its_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`quire replay` of a record that plans differently, made by other code, names the promises that hold."""
    with monkeypatch.context() as other:
        other.setattr(recording, "code_hash", lambda: "other")
        other.setattr(plan_timing, "LEAD_S", 0.004)
        record_run(tmp_path, LITTLE_MEMORY, num_workers=1, num_requests=30)
    parser = OneLineParser("quire replay", description="", examples="")
    configure(parser)

    status = run(parser.parse([str(tmp_path)]))

    printed = capsys.readouterr().out
    assert status == 0
    assert "recorded by other code (other)" in printed
    assert "promises hold: 30 requests" in printed
