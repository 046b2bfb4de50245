"""The promises of prefix sharing: less work, the same tokens, and no access to prompts of others."""

import numpy as np

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from shared.prefix_keys import KEY_BYTES, following_keys, root_key
from tests.scheduler_svc.cluster import FRONTEND, Cluster

PREFIX = list(range(100, 140))
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 16}


def _cluster(num_blocks: int = 200, **limits: object) -> Cluster:
    cluster = Cluster(**(LIMITS | limits))
    cluster.join(ModelWorker(b"w/1", num_blocks, 4, 8))
    return cluster


def _check(cluster: Cluster) -> None:
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())


def test_a_prefix_served_before_is_not_computed_again() -> None:
    """The second request computes only what follows the shared full blocks, and says how much it found."""
    cluster = _cluster()
    cluster.submit(1, [*PREFIX, 1, 2], 5)
    cluster.run()
    before = cluster.core.stats().workers[0].counters.scheduled_tokens
    second = cluster.submit(2, [*PREFIX, 3, 4, 5], 5)
    cluster.run()
    _check(cluster)
    assert second.end is not None
    assert second.end.cached_prompt_tokens == 40
    assert cluster.core.stats().workers[0].counters.scheduled_tokens - before == 3 + 4


def test_the_last_token_is_always_computed() -> None:
    """A completely cached prompt still computes its last block, because its logits are needed."""
    cluster = _cluster()
    for stream in (1, 2):
        cluster.submit(stream, PREFIX, 5)
        cluster.run()
    _check(cluster)
    end = cluster.readers[2].end
    assert end is not None
    assert end.cached_prompt_tokens == 36


def test_an_answer_is_shared_with_the_next_turn() -> None:
    """Generated tokens enter the cache too, so a conversation's next turn finds its history."""
    cluster = _cluster()
    first = cluster.submit(1, PREFIX, 20)
    cluster.run()
    second = cluster.submit(2, [*PREFIX, *first.tokens, 7, 8], 5)
    cluster.run()
    _check(cluster)
    assert second.end is not None
    assert second.end.cached_prompt_tokens == 56


def test_requests_at_the_same_time_compute_a_common_prefix_once() -> None:
    """Requests with the same new prefix, submitted together, compute it once: the others wait for its blocks."""
    cluster = _cluster()
    for stream in range(6):
        cluster.submit(stream, [*PREFIX, stream], 4)
    cluster.run()
    _check(cluster)
    prompts = len(PREFIX) + 6 * 1
    assert cluster.core.stats().workers[0].counters.scheduled_tokens == prompts + 6 * 3


def test_waiting_for_a_prefix_ends_when_its_owner_goes() -> None:
    """When the request that computes the prefix is cancelled half-way, those that wait compute the rest themselves."""
    cluster = _cluster()
    for stream in range(3):
        cluster.submit(stream, [*PREFIX, stream], 4)
    cluster.plan()
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=0))
    cluster.run()
    for stream in (1, 2):
        reader = cluster.readers[stream]
        assert reader.tokens == expected_output(reader.prompt, 4, set())


def test_memory_is_taken_from_the_cache_least_recently_used_first() -> None:
    """A full cache never keeps a request out, and what was used last survives longest."""
    cluster = _cluster(num_blocks=24)
    for stream in range(6):
        cluster.submit(stream, [stream] * 20, 4)
        cluster.run()
    recent = cluster.submit(10, [*[5] * 20, 1], 4)
    cluster.run()
    oldest = cluster.submit(11, [*[0] * 20, 1], 4)
    cluster.run()
    _check(cluster)
    assert recent.end is not None
    assert oldest.end is not None
    assert recent.end.cached_prompt_tokens == 20
    assert oldest.end.cached_prompt_tokens == 0


def test_other_salts_find_nothing() -> None:
    """A request with another salt computes the same prompt as if it were new."""
    cluster = _cluster()
    for stream, salt in enumerate([b"alice", b"bob", b"alice"]):
        cluster.submit(stream, PREFIX, 4, salt=salt)
        cluster.run()
    found = [reader.end.cached_prompt_tokens for reader in cluster.readers.values() if reader.end]
    assert found == [0, 0, 36]


def test_a_request_that_waits_for_another_model_shares_its_prefix_there() -> None:
    """Keys depend on the model, so a request that waited while the model changed gets keys for the new model."""
    cluster = _cluster()
    cluster.submit(1, [*PREFIX, 1], 5)
    cluster.plan()
    cluster.lose(b"w/1")
    cluster.submit(2, [9, 9], 5, model="g")
    cluster.join(ModelWorker(b"w/2", 200, 4, 8, fingerprint="g"), "w/2")
    cluster.run()
    third = cluster.submit(3, [*PREFIX, 3], 5)
    cluster.run()

    assert third.end is not None
    assert third.end.cached_prompt_tokens == 40


def test_off_shares_nothing() -> None:
    """With the cache off every prompt is computed in full, with the same tokens."""
    cluster = _cluster(prefix_cache="off")
    for stream in range(2):
        cluster.submit(stream, PREFIX, 4)
        cluster.run()
    _check(cluster)
    (worker,) = cluster.core.stats().workers
    assert (worker.counters.cached_tokens, worker.blocks_cached) == (0, 0)


def test_blocks_of_a_failed_row_are_never_shared() -> None:
    """When a row fails, requests that share its blocks recompute them, and later requests do not find them."""
    cluster = _cluster()
    cluster.submit(0, [*PREFIX, 1], 30)
    while not cluster.readers[0].tokens:
        cluster.plan()
        cluster.answer()
    cluster.submit(1, [*PREFIX, 2], 4)
    cluster.plan()
    answer = cluster.answers[b"w/1"].popleft()
    failing = answer.rows == answer.rows[0]
    cluster.handle(
        ev.StepDone(
            worker=answer.worker,
            epoch=answer.epoch,
            step=answer.step,
            rows=answer.rows[~failing],
            tokens=answer.tokens[~failing],
            failures=(
                ev.FailedRow(row=int(answer.rows[0]), generation=1, kind=ev.FailureKind.NOT_FINITE, reason="NaN"),
            ),
        )
    )
    assert cluster.readers[0].end is not None
    assert cluster.readers[0].end.reason is ef.EndReason.ROW_FAILED
    cluster.run()
    later = cluster.submit(2, [*PREFIX, 3], 4)
    cluster.run()
    assert cluster.readers[1].tokens == expected_output([*PREFIX, 2], 4, set())
    assert later.tokens == expected_output([*PREFIX, 3], 4, set())


def test_keys_depend_on_everything_before_them() -> None:
    """Equal keys mean equal model, salt and tokens from the first to the last of the block."""
    tokens = np.arange(12, dtype=np.int32).tobytes()
    changed = np.array([9, *range(1, 12)], np.int32).tobytes()

    def keys(root: bytes, text: bytes) -> list[bytes]:
        joined = following_keys(root, text, 4)
        return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]

    root = root_key("model", b"salt")
    base = keys(root, tokens)
    assert len(base) == len(set(base)) == 3
    assert not set(base) & set(keys(root, changed))
    assert not set(base) & set(keys(root_key("model", b"pepper"), tokens))
    assert not set(base) & set(keys(root_key("other", b"salt"), tokens))


def test_a_tree_may_be_as_deep_as_a_prompt_is_long() -> None:
    """Prompts that diverge from a long one at every block turn each block into a run; all runs are dropped at once."""
    depth = 1_200
    cache = PrefixCache(2 * depth)
    keys = [number.to_bytes(4, "big").rjust(KEY_BYTES, b"k") for number in range(2 * depth)]
    blocks = np.arange(2 * depth)
    cache.publish(b"".join(keys[:depth]), blocks[:depth])
    for length in range(1, depth):
        aside = depth + length
        cache.publish(b"".join([*keys[:length], keys[aside]]), np.append(blocks[:length], aside))

    forgotten = cache.forget(blocks[:1])

    assert sorted(forgotten.tolist()) == [*range(depth), *range(depth + 1, 2 * depth)]
    assert not cache.holds.any()
    cache.validate()
