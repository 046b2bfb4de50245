"""What requests get that ask the core to retain their KV, or that announce the pause of their session."""

from unittest.mock import Mock

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.memory.retention import Retention
from tests.scheduler_svc.cluster import Cluster

_BLOCK = 4
_NUM_BLOCKS = 32


class _Requests:
    """Requests on a cluster of one worker, one after the other."""

    def __init__(self, **limits: object) -> None:
        self.cluster = Cluster(**limits)
        self.cluster.join(ModelWorker(b"w/1", _NUM_BLOCKS, _BLOCK, 16))
        self._stream = 0

    def serve(self, first_token: int, num_tokens: int = 20, **hints: object) -> int:
        """Serve a prompt; return how many of its tokens were cached."""
        self._stream += 1
        prompt = [(first_token * 37 + index) % 997 for index in range(num_tokens)]
        self.cluster.submit(self._stream, prompt, 4, **hints)  # type: ignore[arg-type]
        self.cluster.run()
        end = self.cluster.readers[self._stream].end
        assert end is not None
        return end.cached_prompt_tokens

    def fill(self) -> None:
        """Use all memory for other prompts."""
        for number in range(_NUM_BLOCKS):
            self.serve(500 + number, 16)


def test_a_retained_prompt_outlives_pressure_and_others_do_not() -> None:
    """Cached blocks that are retained are evicted after all others, until their time has passed."""
    requests = _Requests()
    requests.serve(1, retention_s=60.0)
    requests.serve(2)
    requests.fill()

    assert requests.serve(2) == 0
    assert requests.serve(1) == 16
    requests.cluster.now += 61.0
    requests.fill()
    assert requests.serve(1) == 0


def test_without_a_share_hints_have_no_effect() -> None:
    """`retention_share` 0 turns retention off."""
    requests = _Requests(retention_share=0.0)
    requests.serve(1, retention_s=60.0)
    requests.fill()

    assert requests.serve(1) == 0


def test_retained_blocks_do_not_delay_running_requests() -> None:
    """A request that needs the memory of retained blocks gets it."""
    requests = _Requests(retention_share=1.0)
    for number in range(6):
        requests.serve(number, retention_s=60.0, retention_priority=9)

    assert requests.serve(50, 110) == 0


def test_a_tenant_keeps_its_equal_part_however_much_another_retains() -> None:
    """A tenant with many hints cannot end the retention of another one with few."""
    requests = _Requests(retention_share=0.5)
    requests.serve(1, tenant="few", retention_s=600.0)
    for number in range(20):
        requests.serve(100 + number, 24, tenant="many", retention_s=600.0, retention_priority=9)
    requests.fill()

    assert requests.serve(1, tenant="few") == 16


def test_the_retention_of_a_second_tenant_follows_that_of_the_first() -> None:
    """A block that two tenants retain has the higher priority, and stays until both retentions have ended."""
    retention = Retention(16, 0.5)
    retention.retain(np.arange(4), "a", 0, 10.0)
    retention.retain(np.arange(6), "b", 5, 20.0)

    assert retention.levels(np.arange(6)).tolist() == [6] * 6
    retention.ended(10.0)
    assert retention.levels(np.arange(6)).tolist() == [6] * 6
    retention.validate()
    retention.ended(20.0)
    assert not retention


def test_a_shared_prefix_counts_for_the_first_tenant() -> None:
    """A tenant that waits for blocks has room for as many others as without them."""
    retention = Retention(16, 0.5)
    retention.retain(np.arange(4), "a", 0, 10.0)
    retention.retain(np.arange(8), "b", 0, 10.0)

    assert retention.levels(np.arange(8)).tolist() == [1] * 8


def test_a_prefix_lost_for_want_of_room_goes_to_the_tenant_that_waits_for_it() -> None:
    """A tenant that must reduce its part loses no blocks that another tenant within its part retains, too."""
    retention = Retention(16, 0.5)
    retention.retain(np.arange(8), "a", 0, 10.0)
    retention.retain(np.arange(6, 8), "b", 0, 10.0)
    retention.retain(np.arange(8, 10), "c", 0, 10.0)
    retention.validate()

    assert retention.levels(np.arange(10)).tolist() == [1] * 4 + [0] * 2 + [1] * 4


def test_of_several_waiting_tenants_the_highest_priority_stays() -> None:
    """One tenant waits for a block: that with the highest priority, then that whose retention ends last."""
    retention = Retention(16, 0.5)
    retention.retain(np.arange(2), "a", 9, 10.0)
    for tenant, priority, until in (("b", 0, 20.0), ("c", 5, 20.0), ("d", 5, 30.0), ("e", 0, 99.0)):
        retention.retain(np.arange(2), tenant, priority, until)

    retention.ended(20.0)
    assert retention.levels(np.arange(2)).tolist() == [6, 6]
    retention.ended(30.0)
    assert not retention


def test_a_tenant_with_a_short_retention_does_not_cost_another_its_prefix() -> None:
    """A prompt that another tenant retained first, for a shorter time, outlives other retained KV of lower priority."""
    requests = _Requests()
    requests.serve(1, tenant="a", retention_s=1.0)
    requests.serve(1, tenant="b", retention_s=600.0, retention_priority=9)
    requests.cluster.now += 2.0
    requests.fill()

    assert requests.serve(1, tenant="b") == 16


def test_tenants_that_ask_for_more_get_equal_parts() -> None:
    """A later tenant takes from the one with more, the lowest priority first, from the end of the sequence."""
    retention = Retention(16, 0.5)
    retention.retain(np.arange(4), "a", 3, 10.0)
    retention.retain(np.arange(4, 8), "a", 1, 10.0)
    retention.retain(np.arange(8, 16), "b", 0, 10.0)

    assert retention.levels(np.arange(16)).tolist() == [4] * 4 + [0] * 4 + [1] * 4 + [0] * 4


def test_more_tenants_than_room_leave_the_retention_of_earlier_ones() -> None:
    """A tenant for which there is no room for a single block does not end the retention of all others."""
    retention = Retention(16, 0.5)
    for block in range(9):
        retention.retain(np.array([block]), f"t{block}", 9, 10.0)
    retention.validate()

    assert retention.levels(np.arange(9)).tolist() == [10] * 8 + [0]


def test_a_sequence_with_windows_is_retained_whole_or_not_at_all() -> None:
    """Without its last blocks, such a sequence is of no use; the earlier turn that is retained already stays."""
    retention = Retention(16, 0.5)
    retention.retain(np.arange(4), "a", 0, 10.0, whole=True)
    retention.retain(np.array([0, 1, 2, 4, 5, 6, 7, 8, 9]), "a", 0, 10.0, whole=True)
    retention.validate()

    assert retention.levels(np.arange(10)).tolist() == [1] * 4 + [0] * 6


def test_a_sequence_with_windows_that_cannot_be_retained_takes_no_room() -> None:
    """If blocks with a higher priority leave too little room, those with a lower priority are not lost in vain."""
    retention = Retention(20, 0.5)
    retention.retain(np.arange(4), "a", 0, 10.0, whole=True)
    retention.retain(np.arange(4, 10), "a", 5, 10.0, whole=True)
    retention.retain(np.arange(10, 18), "a", 3, 10.0, whole=True)
    retention.validate()
    assert retention.levels(np.arange(18)).tolist() == [1] * 4 + [6] * 6 + [0] * 8

    retention.retain(np.arange(10, 14), "a", 3, 10.0, whole=True)
    retention.validate()
    assert retention.levels(np.arange(18)).tolist() == [0] * 4 + [6] * 6 + [4] * 4 + [0] * 4


def test_a_sequence_with_windows_loses_its_room_as_a_whole() -> None:
    """A tenant that must reduce its part loses the oldest sequence with windows, and keeps the others complete."""
    retention = Retention(16, 0.5)
    retention.retain(np.arange(4), "a", 0, 10.0, whole=True)
    retention.retain(np.arange(4, 8), "a", 0, 10.0, whole=True)
    retention.retain(np.array([8]), "b", 0, 10.0, whole=True)
    retention.validate()

    assert retention.levels(np.arange(9)).tolist() == [0] * 4 + [1] * 5


def test_a_new_tenant_costs_the_others_no_more_than_it_needs() -> None:
    """Parts are not rounded down for all tenants, and one sequence with windows is lost if one is enough."""
    blocks, whole = Retention(40, 0.5), Retention(40, 0.5)
    for number, tenant in enumerate("abcde"):
        for retention, is_whole in ((blocks, False), (whole, True)):
            retention.retain(np.arange(4 * number, 4 * number + 4), tenant, 0, 10.0, whole=is_whole)
    blocks.retain(np.array([20]), "f", 0, 10.0)
    whole.retain(np.array([20]), "f", 0, 10.0, whole=True)
    blocks.validate()
    whole.validate()

    assert blocks.num_blocks == 20
    assert whole.num_blocks == 4 * 4 + 1
    assert blocks.levels(np.array([20])) == whole.levels(np.array([20])) == 1


def test_many_blocks_that_two_tenants_retain_change_hands_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for one more block computes the parts a few times, not once for each block that makes no room."""
    retention = Retention(2000, 0.5)
    retention.retain(np.arange(1000), "a", 0, 10.0)
    retention.retain(np.arange(1000), "b", 0, 20.0)
    computed = Mock(side_effect=retention._equal_part)
    monkeypatch.setattr(retention, "_equal_part", computed)

    retention.retain(np.array([1000]), "b", 0, 20.0)
    retention.validate()

    assert 0 < computed.call_count < 20
    assert abs(retention._by_tenant["a"] - retention._by_tenant["b"]) <= 1
    assert retention.num_blocks == 1000


def test_ends_of_lost_retentions_are_forgotten() -> None:
    """If many retentions end before their time, the number of remembered ends is reduced, too."""
    retention = Retention(400, 0.5)
    for block in range(150):
        retention.retain(np.array([block]), "a", 0, 10.0)

    retention.forget(np.arange(150))

    retention.validate()
    assert not retention


def test_the_default_share_is_half_of_the_cache() -> None:
    """Without configuration, at most half of a worker's blocks are retained."""
    requests = _Requests()
    for number in range(20):
        requests.serve(number, retention_s=600.0)
    (worker,) = requests.cluster.core._fleet

    assert CoreConfig().retention_share == 0.5
    assert worker.pool.retention.num_blocks == _NUM_BLOCKS // 2


def test_the_last_turn_of_a_session_ends_the_retention_of_the_earlier_turns() -> None:
    """After a turn with `ends_session`, the KV of the session is evicted like any other."""
    requests = _Requests()
    requests.serve(1, session=b"agent", retention_s=600.0)
    requests.serve(2, retention_s=600.0)
    requests.serve(3, session=b"agent", ends_session=True)
    requests.fill()

    assert requests.serve(1) == 0
    assert requests.serve(2) == 16


def test_an_unnamed_session_ends_its_retention_too() -> None:
    """A turn that extends the sequence of an earlier one belongs to the same session without a name."""
    requests = _Requests()
    requests.serve(1, retention_s=600.0)
    requests.serve(1, 40, ends_session=True)
    requests.fill()

    assert requests.serve(1) == 0


def test_the_last_turn_may_retain_its_own_kv() -> None:
    """A retention time in the last turn of a session replaces that of the earlier turns."""
    requests = _Requests()
    requests.serve(1, session=b"agent", retention_s=600.0)
    requests.serve(1, session=b"agent", ends_session=True, retention_s=60.0)
    requests.fill()

    assert requests.serve(1) == 16
    requests.cluster.now += 61.0
    requests.fill()
    assert requests.serve(1) == 0


def test_a_prefix_of_two_sessions_stays_when_one_of_them_ends() -> None:
    """A block that another session of the tenant retains, too, stays until its time has passed."""
    requests = _Requests()
    requests.serve(1, session=b"one", retention_s=600.0)
    requests.serve(1, session=b"two", retention_s=600.0)
    requests.serve(2, session=b"two", ends_session=True)
    requests.fill()

    assert requests.serve(1) == 16


def test_the_number_of_retained_blocks_falls_on_an_idle_worker() -> None:
    """The metric shows the end of a retention although no plan is made."""
    requests = _Requests()
    requests.serve(1, retention_s=60.0)
    assert [each.blocks_retained for each in requests.cluster.core.stats().workers] == [5]
    requests.cluster.now += 61.0
    requests.cluster.handle(ev.TimePassed())

    assert [each.blocks_retained for each in requests.cluster.core.stats().workers] == [0]
