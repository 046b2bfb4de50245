"""What the host cache promises: prefixes that leave the device come back as they were, and nothing else comes back."""

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.interface.records import WaitReason
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.host_keys import BlockEntry, CachedBlock, HostKeys
from scheduler_svc.core.memory.prefix_directory import PrefixDirectory
from scheduler_svc.core.memory.swapping import SwapSpace
from scheduler_svc.core.planning.steady import plan_steady
from scheduler_svc.core.workers.copy_cost import CopyCost
from scheduler_svc.core.workers.cost_model import CostModel
from shared.prefix_keys import KEY_BYTES, BlockKey
from tests.scheduler_svc.cluster import FRONTEND, Cluster

EPOCH = 5
ROOT = b"r" * KEY_BYTES


def _key(number: int, prefix: bytes = b"k") -> BlockKey:
    return prefix + number.to_bytes(KEY_BYTES - len(prefix), "big")


def _keys(count: int) -> bytes:
    return b"".join(map(_key, range(count)))


def _entries(*numbers: int) -> list[BlockEntry]:
    """Entries with these numbers; number 0 begins a sequence."""
    return [BlockEntry(_key(number), ROOT, not number) for number in numbers]


def _blocks(*numbers: int) -> IndexArray:
    return np.array(numbers, np.intp)


# ---------------------------------------------------------------- keys


def test_a_prefix_is_found_from_where_the_device_ends() -> None:
    """The blocks after the first `start` ones are found up to the first gap, without the blocks before them."""
    keys = HostKeys(10)
    keys.add(_entries(2, 3, 5), _blocks(7, 8, 9))

    assert keys.match(_keys(6), 2).tolist() == [7, 8]
    assert keys.match(_keys(6), 5).tolist() == [9]
    assert keys.match(_keys(6), 0).tolist() == keys.match(_keys(6), 6).tolist() == []


def test_a_removed_block_is_not_found() -> None:
    """Removing blocks returns those that were in the table, and their keys can be added again."""
    keys = HostKeys(10)
    keys.add(_entries(0, 1), _blocks(3, 4))

    assert keys.forget(_blocks(4, 5)).tolist() == [4]
    assert keys.match(_keys(2), 0).tolist() == [3]
    keys.add(_entries(1), _blocks(5))
    assert keys.match(_keys(2), 0).tolist() == [3, 5]
    keys.validate()


def test_the_directory_names_a_worker_while_one_tier_has_the_block() -> None:
    """A first block that is in both tiers of a worker may leave either of them first."""
    directory = PrefixDirectory()
    keys = HostKeys(4, directory, EPOCH)
    directory.add(_key(0), EPOCH)
    keys.add(_entries(0, 1), _blocks(0, 1))

    directory.remove(_key(0), EPOCH)
    assert EPOCH in directory.epochs(_key(0))
    keys.forget(_blocks(0, 1))
    assert EPOCH not in directory.epochs(_key(0))


def test_a_lost_worker_leaves_the_directory() -> None:
    """After the loss of its worker, a host table is no longer in the directory."""
    directory = PrefixDirectory()
    keys = HostKeys(4, directory, EPOCH)
    keys.add(_entries(0, 1), _blocks(0, 1))
    keys.leave_directory()

    assert EPOCH not in directory.epochs(_key(0))
    keys.forget(_blocks(0, 1))


# ---------------------------------------------------------------- host blocks


def _space(num_blocks: int) -> SwapSpace:
    return SwapSpace(num_blocks, caches=True)


def _store(space: SwapSpace, *numbers: int, step: int = 1) -> IndexArray:
    """Move device blocks with these keys to the host in `step`; return the host blocks."""
    cached = [CachedBlock(number, entry, None) for number, entry in zip(numbers, _entries(*numbers), strict=True)]
    return space.store(cached, last_step=step, answered_step=step - 1).targets


def test_a_host_block_is_evicted_only_after_the_copy_to_it() -> None:
    """While the copy is in flight, its blocks count as held. Then they are available again."""
    space = _space(4)
    _store(space, 1, 2, 3, step=1)
    assert not space.has_room(2)
    space.pool.step_answered(1)

    assert space.has_room(4)
    assert space.pool.num_cached == 3


def test_a_host_block_is_evicted_only_after_the_copy_from_it() -> None:
    """A block that is being copied back cannot be taken until the result of the step arrives."""
    space = _space(2)
    host = _store(space, 1, 2, step=1)
    space.pool.step_answered(1)
    space.load(host, _blocks(8, 9), last_step=2, answered_step=1)
    assert not space.has_room(1)
    space.pool.step_answered(2)

    assert space.has_room(2)


def test_blocks_that_the_device_has_too_are_evicted_first() -> None:
    """A block that was copied back is evicted before blocks that were used earlier."""
    space = _space(4)
    _store(space, 1, 2, step=1)
    newer = _store(space, 3, 4, step=2)
    space.pool.step_answered(2)
    space.load(newer, _blocks(8, 9), last_step=3, answered_step=2)
    space.pool.step_answered(3)

    _store(space, 5, 6, step=4)
    assert [space.keys.get(_key(number)) is not None for number in range(1, 7)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_block_that_the_device_loses_again_counts_as_used() -> None:
    """A twin whose device block is evicted needs no copy, and is then the last to be evicted."""
    space = _space(4)
    older = _store(space, 1, 2, step=1)
    _store(space, 3, 4, step=2)
    space.pool.step_answered(2)
    space.load(older, _blocks(8, 9), last_step=3, answered_step=2)
    space.pool.step_answered(3)
    space.pool.lost_twins(older)

    _store(space, 5, 6, step=4)
    assert space.keys.match(b"".join(map(_key, (1, 2))), 0).tolist() == older.tolist()
    assert space.keys.get(_key(3)) is None


def test_preempted_requests_have_precedence() -> None:
    """The KV of a preempted request replaces cached blocks; cached blocks never replace it."""
    space = _space(4)
    _store(space, 0, 1, 2, step=1)
    space.pool.step_answered(1)
    assert space.has_room(3)
    space.out(_blocks(4, 5, 6))

    assert len(space.keys) == 1
    assert not space.has_room(2)


def test_room_is_made_before_it_is_needed() -> None:
    """As many device blocks as recent plans took are to be free, and the plan's own need comes on top."""
    space, device = _space(8), BlockPool(40)
    chain = device.take(40)
    device.cache.publish(_keys(40), chain)
    space.blocks_taken(4, device.num_blocks)
    device.release(chain[20:], last_step=0, answered_step=0)
    device.evict(chain[34:])

    assert device.num_free == 6
    assert not space.wants_room(device, 2)
    assert space.wants_room(device, 3)
    assert not SwapSpace(8).wants_room(device, 3)


def test_the_chance_of_return_is_learned() -> None:
    """It falls with each block that leaves the host unused, rises with each that returns, and slowly without news."""
    space = _space(256)
    for step in range(1, 401):
        _store(space, step, step=step)
        space.pool.step_answered(step)
    unused = space.return_chance
    assert unused < 0.2

    host = space.match(b"".join(map(_key, range(300, 400))), 0)
    space.load(host, _blocks(*range(100)), last_step=401, answered_step=400)
    used = space.return_chance
    assert used > 0.8
    space.pool.step_answered(401)
    space.load(host, _blocks(*range(100)), last_step=402, answered_step=401)
    assert space.return_chance == used, "a block returned twice, but was moved here once"

    space.return_chance = unused
    for _ in range(4000):
        space.step_planned(0.01, 0, 1e-4)
    assert space.return_chance > 0.5


def test_blocks_move_if_both_copies_cost_less_than_computing_those_that_return() -> None:
    """A block costs a copy of 1 s out and, if it returns, one back. Computing it costs 0 if it does not return."""
    cost = CopyCost()
    for _ in range(3):
        cost.measured(4, 4.0)

    assert cost.move_pays(2.1, return_chance=1.0)
    assert not cost.move_pays(1.9, return_chance=1.0)
    assert cost.move_pays(6.1, return_chance=0.2)
    assert not cost.move_pays(5.9, return_chance=0.2)


def test_copies_that_overlap_cost_only_the_wait_for_them() -> None:
    """A copy to the host costs next to nothing if it delays no step. The copy back must be faster than computing."""
    cost = CopyCost()
    for _ in range(3):
        cost.measured(4, 4.0, 0.0)

    assert cost.overlaps
    assert cost.move_pays(1.2, return_chance=0.2)
    assert not cost.move_pays(0.9, return_chance=0.2)
    for _ in range(40):
        cost.measured(4, 4.0, 4.0)
    assert not cost.overlaps


def test_moving_is_tried_again() -> None:
    """After 4 decisions against moving a block is moved, then after 8; a block that moves faster starts anew."""
    cost = CopyCost()
    for _ in range(3):
        cost.measured(1, 1.0)
    decisions = [cost.move_pays(1.0, 1.0) for _ in range(14)]
    cost.measured(1, 0.9)

    assert [number for number, pays in enumerate(decisions) if pays] == [4, 13]
    assert [cost.move_pays(1.0, 1.0) for _ in range(5)] == [False] * 4 + [True]


# ---------------------------------------------------------------- plans

LIMITS: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 16}


def _cluster(
    *,
    num_blocks: int = 88,
    num_host_blocks: int = 400,
    copy_s: float = 1e-9,
    copies_overlap: bool = False,
    **limits: object,
) -> Cluster:
    cluster = Cluster(**(LIMITS | limits))
    worker = ModelWorker(
        b"w/1", num_blocks, 4, 8, num_host_blocks=num_host_blocks, copy_s=copy_s, copies_overlap=copies_overlap
    )
    cluster.join(worker)
    return cluster


def _prompt(session: int, length: int = 40) -> list[int]:
    return [100 + 10 * session + number % 7 for number in range(length)]


def _serve(cluster: Cluster, stream: int, prompt: list[int], max_tokens: int = 5, **options: object) -> int:
    """Serve a request alone; return how many of its tokens were cached."""
    reader = cluster.submit(stream, prompt, max_tokens, **options)  # type: ignore[arg-type]
    cluster.run()
    assert reader.tokens == expected_output(prompt, max_tokens, set())
    assert reader.end is not None
    return reader.end.cached_prompt_tokens


def _fill(cluster: Cluster, first_stream: int, sessions: int = 10) -> None:
    """Serve other sessions, until the blocks of earlier ones have left the device."""
    for number in range(sessions):
        _serve(cluster, first_stream + number, _prompt(first_stream + number))


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_prefix_that_left_the_device_is_not_computed_again(prefix_cache: str) -> None:
    """The second turn of a session computes only what is new, although other sessions needed the device's memory."""
    cluster = _cluster(prefix_cache=prefix_cache)
    _serve(cluster, 1, _prompt(1))
    _fill(cluster, 10)
    (before,) = cluster.core.stats().workers
    assert before.swapped_out_blocks > 0
    assert before.counters.restored_tokens == 0
    num_scheduled = before.counters.scheduled_tokens
    cached = _serve(cluster, 2, [*_prompt(1), 7, 8])

    (after,) = cluster.core.stats().workers
    assert cached == 40
    assert after.counters.scheduled_tokens - num_scheduled == 2 + 4
    assert after.counters.restored_tokens > 20
    assert any(line.endswith("tokens copied from host memory") for line in cluster.story(2))
    assert after.host_blocks_held == 0


def test_without_host_memory_it_is_computed_again() -> None:
    """The test above measures the host cache: without it, most of the prefix is lost."""
    cluster = _cluster(num_host_blocks=0)
    _serve(cluster, 1, _prompt(1))
    _fill(cluster, 10)

    assert _serve(cluster, 2, [*_prompt(1), 7, 8]) < 40


def test_a_prefix_returns_only_in_its_cache_scope() -> None:
    """A request of another cache scope finds nothing in host memory."""
    cluster = _cluster()
    _serve(cluster, 1, _prompt(1), salt=b"a")
    _fill(cluster, 10)

    assert _serve(cluster, 2, [*_prompt(1), 7, 8], salt=b"b") == 0
    assert _serve(cluster, 3, [*_prompt(1), 7, 8], salt=b"a") == 40


def test_a_long_prefix_is_copied_by_several_plans() -> None:
    """Before a copy was measured, a plan copies eight blocks. The request waits for the rest, in its place."""
    cluster = _cluster(copy_s=0.0, policy="fcfs")
    _serve(cluster, 1, _prompt(1, 160))
    _fill(cluster, 10)
    num_plans = len(cluster.plans)
    second, third = cluster.submit(2, [*_prompt(1, 160), 7, 8], 5), cluster.submit(3, [5, 6], 5)
    cluster.run()

    plans = [plan for plan in cluster.plans[num_plans:] if plan.swap_ins]
    sizes = [len(copy.targets) for plan in plans for copy in plan.swap_ins]
    assert len(sizes) > 1
    assert max(sizes) <= 8
    assert second.end is not None
    assert second.end.cached_prompt_tokens == 160
    assert any(WaitReason.COPY.value in line for line in cluster.story(2))
    first_admissions = [len(plan.admissions) for plan in plans]
    assert first_admissions[-1] >= 1, "the last copies and the admission are in one plan"
    assert not any(first_admissions[:-1]), "another request overtook the copies"
    assert third.tokens == expected_output([5, 6], 5, set())


def test_no_step_waits_for_copies_that_overlap() -> None:
    """If copies overlap with steps, a request starts with the plan after the last copies of its prefix."""
    cluster = _cluster(copies_overlap=True)
    _serve(cluster, 1, _prompt(1))
    _fill(cluster, 20)
    num_plans = len(cluster.plans)
    assert _serve(cluster, 2, [*_prompt(1), 7, 8]) == 40

    plans = cluster.plans[num_plans:]
    copying = [number for number, plan in enumerate(plans) if plan.swap_ins]
    (admitting,) = [number for number, plan in enumerate(plans) if plan.admissions]
    assert copying
    assert admitting == copying[-1] + 1


def test_copies_for_a_short_prompt_leave_a_long_one_its_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step copies for the shortest prompt belongs to the short part, so the first prompt keeps its half."""
    cluster = _cluster(policy="priority")
    _serve(cluster, 1, _prompt(1, 16))
    _fill(cluster, 10)
    monkeypatch.setattr(CostModel, "block_copy_tokens", property(lambda _self: 1.0))
    cluster.submit(2, [5] * 100, 5, priority=1)
    cluster.plan_for(b"w/1", 1)
    row = cluster.plans[-1].chunk_rows.item(0)
    cluster.submit(3, [*_prompt(1, 16), *[7] * 20], 5)
    cluster.plan_for(b"w/1", 1)

    plan = cluster.plans[-1]
    assert sum(len(copy.targets) for copy in plan.swap_ins) == 4
    chunks = dict(zip(plan.chunk_rows.tolist(), plan.chunk_lengths.tolist(), strict=True))
    assert len(chunks) == 2
    assert chunks[row] >= 16 // 2


def test_slow_copies_are_not_made() -> None:
    """When a copy takes longer than computing the block, a prefix is computed again, except for occasional trials."""
    cluster = _cluster(copy_s=1.0)
    for round_number in range(6):
        _fill(cluster, 10 * (round_number + 1), sessions=3)
    (slow,) = cluster.core.stats().workers
    fast = _cluster()
    for round_number in range(6):
        _fill(fast, 10 * (round_number + 1), sessions=3)

    assert slow.swapped_in_blocks == 0
    assert slow.swapped_out_blocks < fast.core.stats().workers[0].swapped_out_blocks / 4


def test_growing_sequences_move_cached_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long generation takes the memory of an idle session block by block. The session's prefix is not lost."""
    steady: list[bool] = []

    def counted(*arguments: object) -> object:
        plan = plan_steady(*arguments)  # type: ignore[arg-type]
        steady.append(plan is not None)
        return plan

    monkeypatch.setattr("scheduler_svc.core.scheduler.plan_steady", counted)
    cluster = _cluster()
    _serve(cluster, 1, _prompt(1))
    _serve(cluster, 2, [5, 6], max_tokens=330)

    assert any(steady), "no plan took the short cut"
    assert _serve(cluster, 3, [*_prompt(1), 7, 8]) == 40


def test_a_lost_worker_loses_its_host_memory() -> None:
    """Another worker computes the prefix again, with the same tokens, also if copies were in flight."""
    cluster = _cluster(copy_s=0.0)
    _serve(cluster, 1, _prompt(1, 160))
    _fill(cluster, 10)
    second = cluster.submit(2, [*_prompt(1, 160), 7, 8], 5)
    assert cluster.plan()
    assert cluster.plans[-1].swap_ins
    cluster.lose(b"w/1")
    cluster.join(ModelWorker(b"w/2", 88, 4, 8, num_host_blocks=400))
    cluster.run()

    assert second.tokens == expected_output([*_prompt(1, 160), 7, 8], 5, set())
    assert second.end is not None
    assert second.end.cached_prompt_tokens == 0


def test_a_cancelled_request_leaves_its_copied_blocks_in_the_cache() -> None:
    """The blocks that were copied back for a request remain shareable if it ends before it starts."""
    cluster = _cluster(copy_s=0.0)
    _serve(cluster, 1, _prompt(1, 160))
    _fill(cluster, 10)
    cluster.submit(2, [*_prompt(1, 160), 7, 8], 5)
    assert cluster.plan()
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=2))
    cluster.run()

    assert _serve(cluster, 3, [*_prompt(1, 160), 7, 8]) == 160
    (after,) = cluster.core.stats().workers
    assert after.swapped_in_blocks <= 40, "blocks were copied twice"
    assert after.counters.restored_tokens < 160


def test_invalid_kv_empties_the_host() -> None:
    """After a row whose logits are not finite, no block of the host is used any more."""
    cluster = _cluster()
    _serve(cluster, 1, _prompt(1))
    _fill(cluster, 10)
    assert cluster.core.stats().workers[0].host_blocks_cached > 0
    cluster.submit(2, _prompt(2), 8)
    cluster.plan()
    cluster.spoil(2)
    cluster.run()

    assert cluster.core.stats().workers[0].host_blocks_cached == 0
    assert _serve(cluster, 3, [*_prompt(1), 7, 8]) < 40
