"""Promises for a model with recurrent state: each row is computed from its first token, and never rolled back.

The model worker (`records.rules.model_worker`) checks at every token that the state is that of the tokens before.
"""

import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from tests.scheduler_svc.cluster import Cluster


def _cluster(num_blocks: int = 200, max_rows: int = 4, **limits: object) -> Cluster:
    """Return a cluster whose only worker has recurrent state, and also offers drafts and host blocks."""
    cluster = Cluster(**({"max_num_seqs": max_rows, "max_num_batched_tokens": 64} | limits))
    cluster.join(
        ModelWorker(
            b"w/1", num_blocks, 4, max_rows, max_tokens_per_step=64, num_host_blocks=100, max_draft_tokens=4,
            state_bytes=64,
        )
    )  # fmt: skip
    return cluster


def _check_tokens(cluster: Cluster) -> None:
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())


@pytest.mark.parametrize("prefix_cache", ["off", "hash", "radix"])
def test_a_prompt_that_was_computed_before_is_computed_again(prefix_cache: str) -> None:
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
    """When memory runs out, no KV is swapped out, although the worker has host blocks."""
    cluster = _cluster(num_blocks=20, capacity="max_utilization")
    for stream in range(4):
        cluster.submit(stream, [stream, 2, 3], 40)
    cluster.run()

    _check_tokens(cluster)
    (worker,) = cluster.core.stats().workers
    assert worker.counters.preemptions > 0
    assert worker.counters.swapped == worker.counters.restored_tokens == 0


def test_no_row_has_drafts() -> None:
    """A rejected draft could not be taken back, so no plan has a draft limit."""
    cluster = _cluster()
    cluster.submit(1, [1, 2, 3], 60)
    cluster.run()

    _check_tokens(cluster)
    assert not any(len(plan.draft_rows) for plan in cluster.plans)


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
