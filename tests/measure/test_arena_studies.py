"""Studies of the arena: margins of the policies, and the comparison with the real service."""

from pathlib import Path

from measure.studies.arena_validation import jobs
from measure.studies.policy_margins import PURPOSES, Margin, table, workload
from records.whatif.load import Arrival
from scheduler_svc.core.interface.records import EndReason
from shared.prefix_keys import following_keys, root_key
from shared.request_spec import RequestSpec


def _arrival(number: int, tokens: bytes) -> Arrival:
    count = len(tokens) // 4
    keys = following_keys(root_key("f", b""), tokens, 16)
    spec = RequestSpec(f"r{number}", count, 40)
    return Arrival(
        at=float(number), spec=spec, num_tokens=count, num_outputs=7, end=EndReason.LENGTH, keys=keys, block_size=16
    )


def test_requests_of_a_record_share_their_recorded_prefixes() -> None:
    """Two prompts with two equal blocks have two equal pieces, and nothing else in common."""
    first, second = jobs([_arrival(0, bytes(4 * 40)), _arrival(1, bytes(4 * 32) + b"1" * 4 * 8)])
    assert first.prompt[:2] == second.prompt[:2]
    assert not set(first.prompt[2:]) & set(second.prompt[2:])
    assert (first.num_prompt, second.num_prompt) == (40, 40)
    assert (first.num_outputs, second.at) == (7, 1.0)


def test_the_table_of_margins_has_medians_and_ranges() -> None:
    """One line for each policy and workload with results."""
    margins = [
        Margin("sjf", "bursts", "mean latency, s", seed, 10.0, value) for seed, value in enumerate((8.0, 9.0, 5.0))
    ]
    assert table(margins).splitlines()[2:] == ["| `sjf` | mean latency, s | bursts | 10 | 8 | 0.80 | 0.50 to 0.90 |"]


def test_jobs_get_what_a_policy_needs_and_are_otherwise_equal() -> None:
    """Under `fair`, jobs get tenants; times and lengths do not depend on the policy."""
    fair, sjf = (workload("bursts", policy, Path(), 1)[0].first() for policy in ("fair", "sjf"))
    assert {job.tenant for job in fair} == {"one", "two"}
    assert [(job.at, job.prompt) for job in fair] == [(job.at, job.prompt) for job in sjf]
    assert all(len(purpose.workloads) == 3 for purpose in PURPOSES.values())
