"""Promises for a model with recurrent state: each row begins empty or with a saved state, and drafts are rolled back.

The model worker (`records.rules.model_worker`) checks at every token that the state is that of the tokens before.
"""

import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from tests.scheduler_svc.cluster import Cluster


def _cluster(
    num_blocks: int = 200,
    max_rows: int = 4,
    num_checkpoints: int = 0,
    num_host_states: int = 0,
    max_draft_tokens: int = 0,
    **limits: object,
) -> Cluster:
    """Return a cluster whose only worker has recurrent state and host blocks."""
    cluster = Cluster(**({"max_num_seqs": max_rows, "max_num_batched_tokens": 64} | limits))
    cluster.join(
        ModelWorker(
            b"w/1", num_blocks, 4, max_rows, max_tokens_per_step=64, num_host_blocks=100,
            max_draft_tokens=max_draft_tokens,
            state_bytes=64, num_checkpoints=num_checkpoints, num_host_states=num_host_states,
        )
    )  # fmt: skip
    return cluster


def _check_tokens(cluster: Cluster) -> None:
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())


@pytest.mark.parametrize("prefix_cache", ["off", "hash", "radix"])
def test_without_checkpoints_each_prompt_is_computed(prefix_cache: str) -> None:
    """Neither a request with the same prompt nor the next turn of a conversation begins with cached tokens."""
    cluster = _cluster(prefix_cache=prefix_cache)
    prompt = list(range(100, 130))
    for stream in range(3):  # Several at once, as with n > 1.
        cluster.submit(stream, prompt, 10)
    cluster.run()
    cluster.submit(3, [*prompt, *cluster.readers[0].tokens, 7, 8, 9], 10)
    cluster.run()

    _check_tokens(cluster)
    (worker,) = cluster.core.stats().workers
    assert worker.counters.cached_tokens == 0
    assert not any(len(plan.copy_sources) for plan in cluster.plans)


def test_a_preempted_request_is_computed_again() -> None:
    """When memory runs out, no KV is swapped out if the worker has host blocks, but no place for states."""
    cluster = _cluster(num_blocks=20, capacity="max_utilization")
    for stream in range(4):
        cluster.submit(stream, [stream, 2, 3], 40)
    cluster.run()

    _check_tokens(cluster)
    (worker,) = cluster.core.stats().workers
    assert worker.counters.preemptions > 0
    assert worker.counters.swapped == worker.counters.restored_tokens == 0


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
@pytest.mark.parametrize(("num_checkpoints", "prefix_cache"), [(0, "off"), (0, "hash"), (8, "hash"), (8, "radix")])
def test_a_swapped_request_continues_at_its_newest_token(
    num_checkpoints: int, prefix_cache: str, max_plans_in_flight: int
) -> None:
    """Its state moves to the host with its KV. At most as many requests are swapped as there are places for states."""
    cluster = _cluster(
        num_blocks=20, num_checkpoints=num_checkpoints, num_host_states=2, capacity="max_utilization",
        prefix_cache=prefix_cache, max_plans_in_flight=max_plans_in_flight,
    )  # fmt: skip
    for stream in range(4):
        cluster.submit(stream, [stream, 2, 3], 40)
    cluster.run()

    _check_tokens(cluster)
    (worker,) = cluster.core.stats().workers
    assert worker.counters.swapped > 0
    places = range(num_checkpoints, num_checkpoints + 2)
    back = [each for plan in cluster.plans for each in plan.admissions if each.checkpoint in places]
    assert len(back) == worker.counters.swapped
    # The newest token is known, but not computed.
    assert all(len(each.token_ids) - each.num_computed_tokens == 1 for each in back)
    assert worker.host_blocks_held == 0


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_states_are_rolled_back_after_rejected_drafts(max_plans_in_flight: int) -> None:
    """The states of rows with drafts are saved at the ends of blocks, so that the next turn begins there."""
    cluster = _cluster(
        num_checkpoints=8, num_host_states=4, max_draft_tokens=4, prefix_cache="hash",
        max_plans_in_flight=max_plans_in_flight,
    )  # fmt: skip
    prompt = list(range(100, 130))
    cluster.submit(0, prompt, 60)
    cluster.run()
    (worker,) = cluster.core.stats().workers
    assert 0 < worker.counters.accepted_draft_tokens < worker.counters.draft_tokens

    assert _computed_from(cluster, 1, [*prompt, *cluster.readers[0].tokens, 7, 8, 9]) >= 84
    _check_tokens(cluster)


def test_a_request_of_a_lost_worker_begins_again_elsewhere() -> None:
    """The next worker computes the prompt and the delivered tokens before it continues."""
    cluster = _cluster()
    cluster.submit(1, [1, 2, 3], 30)
    for _ in range(10):
        cluster.plan()
        cluster.answer()
    delivered = len(cluster.readers[1].tokens)
    cluster.join(ModelWorker(b"w/2", 200, 4, 4, max_tokens_per_step=64, state_bytes=64))
    cluster.run()

    assert 0 < delivered < 30
    _check_tokens(cluster)


def _computed_from(cluster: Cluster, stream: int, prompt: list[int], max_tokens: int = 10) -> int:
    """Run one request; return its cached tokens."""
    before = len(cluster.plans)
    cluster.submit(stream, prompt, max_tokens)
    cluster.run()
    admissions = [each for plan in cluster.plans[before:] for each in plan.admissions if each.stream == stream]
    return sum(each.num_computed_tokens for each in admissions)


def _full_attention(**limits: object) -> Cluster:
    cluster = Cluster(**({"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefix_cache": "hash"} | limits))
    cluster.join(ModelWorker(b"w/1", 200, 4, 4, max_tokens_per_step=64))
    return cluster


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("max_drafts", [0, 4])
def test_turns_of_a_conversation_hit_as_for_full_attention(
    max_plans_in_flight: int, stops: bool, max_drafts: int
) -> None:
    """Each turn begins at the last full block of the turn before, whether that ended by its limit or a stop token.

    If the last token of the turn before fills a block, its state may not be saved. The next turn then begins a block
    earlier.
    """
    found = []
    for cluster in (
        _cluster(
            num_checkpoints=8, prefix_cache="hash", max_plans_in_flight=max_plans_in_flight, max_draft_tokens=max_drafts
        ),
        _full_attention(max_plans_in_flight=max_plans_in_flight),
    ):
        text, cached = list(range(100, 130)), []
        for turn in range(8):
            stop = {expected_output(text, 9, set())[-1]} if stops else set()
            before = len(cluster.plans)
            reader = cluster.submit(turn, text, 20, stops=stop)
            cluster.run()
            assert reader.tokens == expected_output(text, 20, stop)
            admissions = [each for plan in cluster.plans[before:] for each in plan.admissions]
            cached.append(sum(each.num_computed_tokens for each in admissions))
            text = [*text, *reader.tokens, 7, 8, 9]
        found.append(cached)
        (worker,) = cluster.core.stats().workers
        assert (worker.counters.accepted_draft_tokens > 0) == (max_drafts > 0 and len(found) == 1)

    assert all(full - 4 <= recurrent <= full for recurrent, full in zip(*found, strict=True))
    assert sum(recurrent == full for recurrent, full in zip(*found, strict=True)) >= 6
    assert all(found[0][1:])


def test_the_same_prompt_is_computed_once() -> None:
    """A request waits for the state at the end of an equal prompt, and begins there; so does a later one."""
    cluster = _cluster(num_checkpoints=8, prefix_cache="hash")
    prompt = list(range(100, 130))
    for stream in range(3):
        cluster.submit(stream, prompt, 10)
    cluster.run()

    _check_tokens(cluster)
    assert _computed_from(cluster, 3, prompt) == 28
    (worker,) = cluster.core.stats().workers
    assert worker.counters.cached_tokens == 3 * 28


def test_a_fork_is_computed_once() -> None:
    """The second request with a common beginning saves the state there, and the third one begins there."""
    cluster = _cluster(num_checkpoints=8, prefix_cache="hash")
    prompts = [[*range(100, 120), *[number] * 12] for number in range(4)]

    assert [_computed_from(cluster, stream, prompt) for stream, prompt in enumerate(prompts)] == [0, 0, 20, 20]
    _check_tokens(cluster)


def test_a_preempted_request_continues_from_its_last_full_block() -> None:
    """It is not computed from its first token."""
    cluster = _cluster(
        max_rows=1, num_checkpoints=8, prefix_cache="hash", policy="priority", policy_preemption="on",
        preempt_threshold=0.0,
    )  # fmt: skip
    cluster.submit(0, list(range(100, 130)), 40, priority=0)
    for _ in range(20):
        cluster.plan()
        cluster.answer()
    cluster.submit(1, [1, 2, 3], 4, priority=5)
    cluster.run()

    _check_tokens(cluster)
    (worker,) = cluster.core.stats().workers
    assert worker.counters.preemptions == 1
    assert worker.counters.cached_tokens >= 44


def test_few_checkpoints_are_evicted_in_order_of_use() -> None:
    """The prompt that was used most recently is found, the other one is computed again."""
    cluster = _cluster(num_checkpoints=1, prefix_cache="hash")
    first, second = list(range(100, 130)), list(range(200, 230))
    for stream, prompt in enumerate((first, second)):
        cluster.submit(stream, prompt, 2)
        cluster.run()

    assert _computed_from(cluster, 2, second, 2) == 28
    assert _computed_from(cluster, 3, first, 2) == 0
    _check_tokens(cluster)
