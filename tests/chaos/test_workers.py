"""What clients see while workers die, freeze, hang and are cut off: pauses."""

from pathlib import Path

import pytest

from checks.chaos.campaign import Campaign, Fault, preemptions, run


def test_faults_of_every_kind_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """After a fault of each kind in a random worker under load, every stream ends in full with the reference's tokens.

    Streams are greedy or seeded. Afterwards no block is held and no process is left.
    """
    outcome = run(Campaign(num_streams=16, faults_of_each_kind=1, max_tokens=120, pause_s=1.0), tmp_path)

    print(outcome.figures())
    assert len(outcome.strikes) == len(Fault)
    assert sum(preemptions(streamed) for streamed in outcome.streams) > 0


@pytest.mark.release
def test_faults_of_ranks_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Workers with two ranks behave in the same way, whichever rank a fault hits."""
    outcome = run(Campaign(num_streams=8, faults_of_each_kind=2, max_tokens=80, pause_s=1.0, ranks=2), tmp_path)

    print(outcome.figures())
    assert len(outcome.strikes) == 2 * len(Fault)
    assert sum(preemptions(streamed) for streamed in outcome.streams) > 0


@pytest.mark.release
def test_faults_of_workers_that_speculate_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """With speculation, tokens that a lost worker had accepted are neither lost nor repeated."""
    campaign = Campaign(num_streams=8, faults_of_each_kind=2, max_tokens=200, pause_s=1.0, speculation="ngram")
    outcome = run(campaign, tmp_path)

    print(outcome.figures())
    assert len(outcome.strikes) == 2 * len(Fault)
    assert sum(preemptions(streamed) for streamed in outcome.streams) > 0


@pytest.mark.release
@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Gemma3ForCausalLM", "Qwen3NextForCausalLM"])
def test_faults_with_other_kinds_of_cache_lose_and_repeat_nothing(architecture: str, tmp_path: Path) -> None:
    """Models with latent attention, windows and recurrent state continue on other workers in the same way."""
    campaign = Campaign(num_streams=12, faults_of_each_kind=1, max_tokens=120, pause_s=1.0, architecture=architecture)
    outcome = run(campaign, tmp_path)

    print(outcome.figures())
    assert len(outcome.strikes) == len(Fault)
    assert sum(preemptions(streamed) for streamed in outcome.streams) > 0


@pytest.mark.release
def test_faults_of_workers_with_tiers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Conversations that continue from host memory and disk have the reference's tokens, whatever hits the workers."""
    campaign = Campaign(num_streams=18, faults_of_each_kind=2, max_tokens=150, tiers=tmp_path / "disk")
    outcome = run(campaign, tmp_path)

    print(outcome.figures())
    assert len(outcome.strikes) == 2 * len(Fault)
    assert sum(preemptions(streamed) for streamed in outcome.streams) > 0
