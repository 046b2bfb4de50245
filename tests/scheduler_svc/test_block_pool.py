"""What the block pool and the prefix cache promise about memory and work, however long they are used."""

import gc
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.memory.recency import RecencyQueue
from shared.prefix_keys import KEY_BYTES
from tests.scheduler_svc.operations import count_calls


def _keys(count: int, prefix: bytes = b"k") -> bytes:
    return b"".join(prefix + number.to_bytes(KEY_BYTES - len(prefix), "big") for number in range(count))


def _publish(pool: BlockPool, count: int, prefix: bytes = b"k") -> IndexArray:
    """A chain of blocks that only the prefix cache holds."""
    blocks = pool.take(count)
    pool.cache.publish(_keys(count, prefix), blocks)
    pool.release(blocks, last_step=0, answered_step=0)
    return blocks


def _use(pool: BlockPool, blocks: IndexArray) -> None:
    """A request shares the blocks and ends."""
    pool.share(blocks)
    pool.release(blocks.copy(), last_step=0, answered_step=0)


def _retained(action: object, times: int) -> int:
    """Bytes more that are in use after calling `action` so many times, once it has been called before."""
    assert callable(action)
    action()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(times):
            action()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


def test_identical_requests_leave_nothing_behind() -> None:
    """The memory for the order of use depends on the number of blocks, not on how often they were used."""
    pool = BlockPool(400)
    blocks = _publish(pool, 128)
    assert _retained(lambda: _use(pool, blocks), 5_000) < 10_000


def test_a_popular_prefix_keeps_no_tables_of_ended_requests() -> None:
    """Requests that share a long prefix and have a few own blocks leave only these few."""
    pool = BlockPool(4_000)
    hot = _publish(pool, 1_000)
    number = 0

    def another() -> None:
        nonlocal number
        number += 1
        pool.share(hot)
        own = pool.take(4)
        table = np.concatenate((hot, own))
        pool.cache.publish(_keys(1_000) + _keys(4, number.to_bytes(4, "little")), table)
        pool.release(table, last_step=0, answered_step=0)

    assert _retained(another, 500) < 500 * 2_000
    pool.validate([])


def test_the_computed_beginning_of_a_prompt_does_not_hold_on_to_its_whole_table() -> None:
    """A long prompt that is cancelled after its first blocks leaves only their memory in the order of use."""
    pool = BlockPool(4_000)
    number = 0

    def another() -> None:
        nonlocal number
        number += 1
        table = pool.take(1_000)
        pool.cache.publish(_keys(2, number.to_bytes(4, "little")), table[:2])
        pool.release(table, last_step=0, answered_step=0)

    assert _retained(another, 500) < 500 * 2_000


def test_a_take_costs_no_more_because_blocks_were_used_often() -> None:
    """The first eviction after thousands of uses does as many operations as one after a single use."""

    def cost(uses: int) -> int:
        pool = BlockPool(400)
        blocks = _publish(pool, 128)
        for _ in range(uses):
            _use(pool, blocks)
        pool.take(pool.num_free)
        return count_calls(lambda: pool.take(1))

    assert cost(5_000) == cost(1)


def test_the_least_recently_used_chain_is_evicted_first_and_from_its_end() -> None:
    """Blocks leave the cache in the order of last use; the start of a chain leaves after its end."""
    pool = BlockPool(12)
    first, second, third = (_publish(pool, 4, prefix) for prefix in (b"a", b"b", b"c"))
    _use(pool, first)
    _use(pool, second[:2])
    evicted = [pool.take(1).item() for _ in range(12)]
    order = [*second[:1:-1], *third[::-1], *first[::-1], *second[1::-1]]
    assert evicted == [int(block) for block in order]


def test_a_plan_like_the_one_before_finds_its_blocks_evicted() -> None:
    """After `keep_reserve`, as many blocks as were taken before are free, and taking them costs no eviction."""
    pool = BlockPool(640)
    first, *_ = [_publish(pool, 64, bytes([index])) for index in range(10)]
    pool.keep_reserve()

    taken = pool.take(8)
    pool.keep_reserve()
    num_cached = pool.num_cached
    more = pool.take(8)

    assert {*taken.tolist(), *more.tolist()} <= {*first.tolist()}, "the least recently used blocks go first"
    assert pool.num_cached == num_cached
    pool.validate([taken, more])


def test_the_reserve_is_a_small_part_of_the_cache() -> None:
    """Regardless of a plan's number of blocks, at most one of 32 is evicted before its memory is needed."""
    pool = BlockPool(640)
    _publish(pool, 640)

    pool.keep_reserve()

    assert pool.num_free <= 640 // 32 + 640 // 512
    assert pool.num_cached >= 619
    pool.validate([])


def test_a_partly_evicted_run_releases_its_memory() -> None:
    """A thousand runs with only their first block left take the memory of a thousand blocks."""
    cache = PrefixCache(1_000 * 100)
    number = 0

    def another() -> None:
        nonlocal number
        blocks = np.arange(100 * number, 100 * (number + 1))
        cache.publish(_keys(100, number.to_bytes(4, "little")), blocks)
        cache.forget(blocks[1:])
        number += 1

    assert _retained(another, 999) < 999 * 700


def test_looking_for_a_pending_prefix_compares_no_other_keys() -> None:
    """Whether a key is being computed does not take longer because more prompts are under way."""
    compared = 0

    class Key(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return bytes.__eq__(self, other)

    cache = PrefixCache(1)
    for row in range(4_096):
        cache.computes_next(row, Key(row.to_bytes(KEY_BYTES, "big")))
    compared = 0
    assert not cache.is_pending(Key(b"x" * KEY_BYTES))
    assert cache.is_pending(Key((7).to_bytes(KEY_BYTES, "big")))
    assert compared < 10


def test_a_prefix_is_pending_until_the_last_row_has_computed_it() -> None:
    """Of two rows that compute the same block, the first to go on leaves it pending."""
    cache = PrefixCache(1)
    cache.computes_next(1, b"same")
    cache.computes_next(2, b"same")
    cache.computes_next(1, b"other")
    assert cache.is_pending(b"same")
    cache.computes_next(2, b"")
    assert not cache.is_pending(b"same")
    assert cache.is_pending(b"other")


@given(st.lists(st.tuples(st.sampled_from(["append", "remove", "oldest"]), st.lists(st.integers(0, 9), unique=True))))
def test_the_order_of_use_is_that_of_a_list(operations: list[tuple[str, list[int]]]) -> None:
    """Appending chains and removing blocks in any order gives what a plain list would have."""
    tested, model = RecencyQueue(10), list[int]()
    for name, numbers in operations:
        if name == "append" and (fresh := [number for number in numbers if number not in model]):
            tested.append(np.array(fresh, np.intp))
            model += reversed(fresh)
        elif name == "remove" and (known := [number for number in numbers if number in model]):
            tested.remove(np.array(known, np.intp))
            model = [number for number in model if number not in known]
        elif name == "oldest":
            oldest = tested.oldest(len(numbers)).tolist() if model and numbers else []
            assert oldest == model[: len(oldest)][::-1]
            assert bool(oldest) == bool(model and numbers)
        assert tested.validate() == model


def test_a_block_that_a_step_copies_from_is_not_taken_before_its_answer() -> None:
    """The block is not taken even if its row is preempted in that step's plan and the result has arrived."""
    pool = BlockPool(2)
    blocks = pool.take(2)
    pool.cache.publish(_keys(2), blocks)

    pool.read(blocks[:1], last_step=2, answered_step=1)
    pool.release(blocks, last_step=1, answered_step=1)
    available = [pool.num_available]
    for step in (1, 2):
        pool.step_answered(step)
        available.append(pool.num_available)

    assert available == [1, 1, 2]
    pool.validate([])
