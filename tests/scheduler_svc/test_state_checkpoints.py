"""What the table of state checkpoints promises: which states are found, and which slots are reused."""

import numpy as np

from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from shared.prefix_keys import KEY_BYTES

KEYS = bytes(range(8 * KEY_BYTES % 256)) * 4


def _blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.intp)


def _publish(table: StateCheckpoints, block: int, *, row: int = 0, generation: int = 1) -> int | None:
    slot = table.save(row, generation, block)
    table.plan_made()
    table.validate()
    return slot


def test_blocks_are_shared_up_to_the_last_checkpoint() -> None:
    """KV after the last state is of no use."""
    table = StateCheckpoints(4, 10)
    _publish(table, 5)
    _publish(table, 7)

    assert table.reach(_blocks(4, 5, 6)) == 2
    assert table.reach(_blocks(4, 5, 7, 6)) == 3
    assert table.reach(_blocks(4)) == table.reach(_blocks()) == 0


def test_a_checkpoint_is_dropped_with_its_block() -> None:
    """Its slot is free again."""
    table = StateCheckpoints(1, 10)
    slot = _publish(table, 5)
    table.forget(_blocks(3, 5))

    assert table.reach(_blocks(5)) == 0
    assert _publish(table, 6) == slot
    assert table.num_evicted == 0


def test_the_least_recently_used_checkpoint_is_evicted() -> None:
    """Restoring from a checkpoint counts as use, and so does saving it again."""
    table = StateCheckpoints(3, 10)
    for block in (1, 2, 3):
        _publish(table, block)
    table.restore(1)
    assert _publish(table, 2) is None
    _publish(table, 4)

    assert [table.reach(_blocks(block)) for block in (1, 2, 3, 4)] == [1, 1, 0, 1]
    assert table.num_evicted == 1


def test_a_plan_saves_once_to_each_slot() -> None:
    """If slots are short, the last saves of a plan are omitted."""
    table = StateCheckpoints(2, 10)
    slots = [table.save(row, 1, row) for row in range(3)]
    table.plan_made()

    assert set(slots[:2]) == {0, 1}
    assert slots[2] is None
    assert _publish(table, 3) is not None


def test_a_leaving_row_publishes_its_newest_known_state() -> None:
    """States after tokens that have not arrived are released."""
    table = StateCheckpoints(8, 10)
    slots = {num_tokens: table.save_private(3, 1, num_tokens, num_tokens - 4) for num_tokens in (8, 12, 16)}
    table.plan_made()

    assert table.leave(3, 14) == 12
    table.publish(3, 6)
    table.validate()
    assert table.restore(6) == slots[12]
    assert table.num_used == 1


def test_a_row_retains_no_state_that_a_newer_one_replaces() -> None:
    """As soon as the tokens of the newer state have arrived, the older one is released."""
    table = StateCheckpoints(8, 10)
    for num_tokens in (4, 8, 12, 16):
        table.save_private(3, 1, num_tokens, num_tokens)
        table.plan_made()

    assert table.num_used == 2
    assert table.leave(3, 3) == 0
    assert table.num_used == 0


def test_running_rows_do_not_use_up_the_slots() -> None:
    """At most half of the slots are private. A row without room for another one gives up its older one.

    The older one must be from an earlier plan, because a plan saves at most once to each slot.
    """
    table = StateCheckpoints(4, 10)
    for row in range(4):
        table.save_private(row, 1, 4, 0)
    assert table.save_private(0, 1, 8, 0) is None
    table.plan_made()
    newer = table.save_private(0, 1, 8, 0)
    table.plan_made()
    table.validate()

    assert newer is not None
    assert table.num_used == 2
    assert table.leave(0, 8) == 8
    table.discard(0)
    assert table.leave(2, 8) == 0


def test_the_checkpoints_of_a_failed_row_are_dropped() -> None:
    """Those that another use of the row has saved stay."""
    table = StateCheckpoints(4, 10)
    _publish(table, 1, row=2, generation=5)
    _publish(table, 2, row=2, generation=6)
    table.distrust(2, 5)
    table.validate()

    assert table.reach(_blocks(1)) == 0
    assert table.reach(_blocks(2)) == 1


def test_a_request_waits_for_the_longest_state_that_it_can_use() -> None:
    """It must be longer than what the request can share already, and have its keys."""
    table = StateCheckpoints(4, 10)
    keys = KEYS[: 6 * KEY_BYTES]
    table.want(0, keys, [2, 5])
    table.want(1, keys, [4])

    assert table.awaited(keys, 0) == table.next_key(1) == keys[3 * KEY_BYTES : 4 * KEY_BYTES]
    assert table.awaited(keys[: 3 * KEY_BYTES], 0) == table.next_key(0) == keys[KEY_BYTES : 2 * KEY_BYTES]
    assert table.awaited(keys, 4) == b""
    assert table.reached(0, 4) == [2]
    assert table.awaited(keys, 4) == keys[4 * KEY_BYTES : 5 * KEY_BYTES]
    table.leave(0, 0)
    table.leave(1, 0)
    assert table.awaited(keys, 0) == b""
