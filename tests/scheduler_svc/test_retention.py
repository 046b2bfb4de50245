"""What requests get that ask the core to retain their KV, or that announce the pause of their session."""

import numpy as np

from records.rules.model_worker import ModelWorker
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


def test_the_blocks_of_another_tenant_stay_as_they_are() -> None:
    """A block counts for the tenant that retained it first; hints of other tenants neither extend nor end that."""
    retention = Retention(16, 0.5)
    retention.retain(np.arange(4), "a", 0, 10.0)
    retention.retain(np.arange(6), "b", 5, 20.0)

    assert retention.levels(np.arange(6)).tolist() == [1, 1, 1, 1, 6, 6]
    assert retention.ended(10.0).tolist() == [0, 1, 2, 3]


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


def test_the_default_share_is_half_of_the_cache() -> None:
    """Without configuration, at most half of a worker's blocks are retained."""
    requests = _Requests()
    for number in range(20):
        requests.serve(number, retention_s=600.0)
    (worker,) = requests.cluster.core._fleet

    assert CoreConfig().retention_share == 0.5
    assert worker.pool.retention.num_blocks == _NUM_BLOCKS // 2
