"""Recurrent states in host memory: cached prefixes with their states leave the device and come back."""

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.memory.host_states import HostStates
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.planning.host_copies import HostCopies
from scheduler_svc.core.workers.cost_model import CostModel
from shared.prefix_keys import KEY_BYTES
from tests.scheduler_svc.cluster import Cluster

_A, _B, _C, _D = (bytes([number]) * KEY_BYTES for number in range(4))


def test_a_request_reaches_the_last_state() -> None:
    """It can use the blocks up to the last one with a state, of those whose KV exists."""
    states = HostStates(8, 2)
    assert states.store(_B, 2, 1) == 8

    assert states.reach(_A + _B + _C, 0, 3) == 2
    assert states.reach(_A + _B + _C, 0, 1) == 0
    assert states.reach(_A + _B + _C, 2, 3) == 2
    assert states.load(_B, 2) == 8
    states.validate([])


def test_a_long_prompt_is_searched_only_for_states_that_exist() -> None:
    """The result is the same with fewer states than blocks and with more, whatever lengths other sequences have."""
    keys = b"".join(number.to_bytes(KEY_BYTES, "big") for number in range(300))
    for num_others in (2, 400):
        states = HostStates(0, 500)
        for number in range(num_others):
            states.store((1000 + number).to_bytes(KEY_BYTES, "big"), number % 300 + 1, 1)
        for count in (30, 200):
            states.store(keys[KEY_BYTES * (count - 1) : KEY_BYTES * count], count, 1)

        assert [states.reach(keys, 0, most) for most in (29, 30, 199, 200, 300)] == [0, 30, 30, 200, 200]
        assert states.reach(keys, 30, 199) == 30


def test_a_place_is_written_once_per_plan_and_not_in_the_plan_that_reads_it() -> None:
    """The least recently used state is evicted by the next plan at the earliest."""
    states = HostStates(0, 2)
    states.store(_A, 1, 1)
    states.store(_B, 2, 1)
    assert states.store(_C, 3, 1) is None
    states.load(_A, 2)

    assert states.store(_C, 3, 2) == 1
    assert not states.use(_B)
    assert not states.has_room(2)
    assert states.has_room(3)
    assert (states.num_stored, states.num_loaded, states.num_evicted) == (3, 1, 1)


def test_preempted_requests_replace_cached_states() -> None:
    """A cached state never takes the place of a preempted request."""
    states = HostStates(0, 2)
    states.store(_A, 1, 1)
    states.store(_B, 2, 1)
    held = [states.take(2), states.take(2)]
    assert not states.use(_A)
    assert not states.use(_B)

    assert states.store(_C, 3, 9) is None
    states.validate(held)
    states.release(held[0], 9)
    assert states.store(_C, 3, 9) is None
    assert states.store(_C, 3, 10) == held[0]


def test_a_state_is_stored_once() -> None:
    """A state that is here already counts as used and needs no copy."""
    states = HostStates(0, 2)
    states.store(_A, 1, 1)
    states.store(_B, 2, 1)
    assert states.store(_A, 1, 2) is None

    assert states.store(_C, 3, 3) is not None
    assert states.use(_A)
    assert not states.use(_B)


def test_dropped_states_leave_their_places() -> None:
    """After a failed row nothing is found, and all places are free."""
    states = HostStates(0, 2)
    states.store(_A, 1, 1)
    states.drop_cached()

    assert states.reach(_A, 0, 1) == 0
    assert states.num_cached == states.num_held == 0
    states.validate([])


def test_the_place_of_a_block_in_its_sequence_is_known() -> None:
    """The key before it and its depth are right in every run of the tree; a newer state in the same run replaces it."""
    checkpoints = StateCheckpoints(8, 8)
    cache = PrefixCache(8, checkpoints=checkpoints)
    cache.publish(_A + _B + _C + _D, np.arange(4))
    cache.publish(_A + _B + _D, np.array([0, 1, 4]))
    for block in (0, 1, 2, 4):
        checkpoints.save(0, 1, block)
    checkpoints.plan_made()
    checkpoints.save(0, 1, 3)

    places = [each.chain for each in cache.entries(np.arange(5)) if each.chain is not None]
    assert [each.previous for each in places] == [b"", _A, _B, _C, _B]
    assert [each.num_blocks for each in places] == [1, 2, 3, 4, 3]
    assert [each.is_superseded for each in places] == [True, False, True, False, False]
    assert [each.checkpoint >= 0 for each in places] == [True, True, True, False, True]


# ---------------------------------------------------------------- conversations


def _cluster(*, num_blocks: int, num_checkpoints: int, num_host_states: int, **limits: object) -> Cluster:
    cluster = Cluster(**({"max_num_seqs": 2, "max_num_batched_tokens": 64, "prefix_cache": "hash"} | limits))
    cluster.join(
        ModelWorker(
            b"w/1", num_blocks, 4, 2, max_tokens_per_step=64, num_host_blocks=400, copy_s=1e-9,
            state_bytes=64, num_checkpoints=num_checkpoints, num_host_states=num_host_states,
        )
    )  # fmt: skip
    return cluster


def _converse(cluster: Cluster, num_sessions: int, num_turns: int) -> tuple[int, int]:
    """Let sessions take turns one after the other; return repeated tokens, and those that were cached."""
    texts = [[number, *range(100, 131)] for number in range(num_sessions)]
    repeated = cached = stream = 0
    for turn in range(num_turns):
        for number, text in enumerate(texts):
            before = len(cluster.plans)
            reader = cluster.submit(stream, text, 10)
            cluster.run()
            assert reader.tokens == expected_output(text, 10, set())
            admissions = [each for plan in cluster.plans[before:] for each in plan.admissions]
            if turn:
                repeated += len(text) - 3
                cached += sum(each.num_computed_tokens for each in admissions)
            texts[number] = [*text, *reader.tokens, 7, 8, 9]
            stream += 1
    return repeated, cached


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("num_blocks", "num_checkpoints"),
    [
        pytest.param(60, 40, id="few blocks"),
        pytest.param(1000, 6, id="few checkpoints"),
        pytest.param(60, 6, id="both"),
    ],
)
def test_turns_of_many_conversations_hit_from_host_memory(
    num_blocks: int, num_checkpoints: int, max_plans_in_flight: int
) -> None:
    """If blocks or checkpoints of the device are too few, nearly all tokens that turns repeat are cached nevertheless.

    Without places for states, hardly any is.
    """
    shares = []
    for num_host_states in (0, 40):
        cluster = _cluster(
            num_blocks=num_blocks, num_checkpoints=num_checkpoints, num_host_states=num_host_states,
            max_plans_in_flight=max_plans_in_flight,
        )  # fmt: skip
        repeated, cached = _converse(cluster, num_sessions=12, num_turns=5)
        shares.append(cached / repeated)

    assert shares[0] < 0.1
    assert shares[1] > 0.85
    (worker,) = cluster.core.stats().workers
    assert worker.host_states.held == worker.host_blocks_held == 0
    assert (worker.counters.restored_tokens > 0) == (num_blocks < 100)


def test_a_prefix_that_several_plans_copy_begins_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request waits for the last block, and begins with the state in host memory."""
    cluster = _cluster(num_blocks=40, num_checkpoints=6, num_host_states=8)
    _converse(cluster, num_sessions=6, num_turns=1)
    monkeypatch.setattr(HostCopies, "_take_budget", lambda self, num_blocks: min(1, num_blocks))
    first = [0, *range(100, 131)]
    text = [*first, *expected_output(first, 10, set()), 7, 8, 9]
    before = len(cluster.plans)
    reader = cluster.submit(100, text, 4)
    cluster.run()

    assert reader.tokens == expected_output(text, 4, set())
    plans = cluster.plans[before:]
    (admission,) = (each for plan in plans for each in plan.admissions)
    num_copied = [len(copy.sources) for plan in plans for copy in plan.swap_ins]
    assert num_copied == [1] * (admission.num_restored_tokens // 4)
    assert len(num_copied) > 5
    assert admission.checkpoint is not None
    assert admission.checkpoint >= 6


def test_a_state_that_is_not_used_because_computing_is_faster_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its state is in host memory, so neither the story nor the metric says that a checkpoint was missing."""
    cluster = _cluster(num_blocks=40, num_checkpoints=6, num_host_states=8)
    _converse(cluster, num_sessions=6, num_turns=1)
    monkeypatch.setattr(CostModel, "restores", lambda *_: False)
    first = [0, *range(100, 131)]
    before = len(cluster.plans)
    cluster.submit(100, [*first, *expected_output(first, 10, set()), 7, 8, 9], 4)
    cluster.run()

    assert [each.num_computed_tokens for plan in cluster.plans[before:] for each in plan.admissions] == [0]
    assert cluster.core.stats().workers[0].counters.unusable_tokens == 0


@pytest.mark.parametrize(("num_host_states", "moves"), [(8, True), (1, False)])
def test_blocks_without_a_state_do_not_move(num_host_states: int, moves: bool) -> None:
    """If a newer prefix has the only place when the blocks of a prefix leave the device, they are not copied."""
    cluster = _cluster(num_blocks=24, num_checkpoints=1, num_host_states=num_host_states)
    for stream in range(6):
        cluster.submit(stream, [stream, *range(100, 131)], 2)
        cluster.run()
    (worker,) = cluster.core.stats().workers

    assert worker.host_states.stored == 5
    assert (worker.swapped_out_blocks > 0) == moves
