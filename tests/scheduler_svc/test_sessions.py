"""What the gate for new sessions promises: later turns pass, first turns wait for memory, and every wait ends."""

from itertools import count

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import WaitReason
from scheduler_svc.core.lifecycle.statistics import SchedulerStats
from scheduler_svc.core.queueing import sessions
from scheduler_svc.core.queueing.session_gate import window_need
from scheduler_svc.core.queueing.sessions import tenant_number
from scheduler_svc.present_limit import LimitKind, present_limit
from tests.scheduler_svc.cluster import FRONTEND, Cluster

_BLOCK = 4
_NUM_BLOCKS = 64
"""Blocks of the worker: 256 tokens."""
_WAIT_S = 30.0


class _Agents:
    """Sessions on a cluster of one worker. Each turn extends the whole sequence of the turn before."""

    def __init__(self, worker: ModelWorker | None = None, **limits: object) -> None:
        self.cluster = Cluster(**({"session_wait_s": _WAIT_S} | limits))
        self.cluster.join(worker or ModelWorker(b"w/1", _NUM_BLOCKS, _BLOCK, 16))
        self._streams = count(1)
        self._tokens = count(1)

    def new_tokens(self, number: int) -> list[int]:
        """Tokens that no earlier sequence has at this place."""
        first = next(self._tokens) * 37
        return [(first + index) % 997 for index in range(number)]

    def turn(
        self,
        sequence: list[int],
        max_tokens: int = 8,
        tenant: str = "",
        *,
        name: bytes = b"",
        ends: bool = False,
        pause_s: float = 0.0,
    ) -> int:
        """Submit a prompt, and return its stream."""
        stream = next(self._streams)
        self.cluster.submit(
            stream, sequence, max_tokens, tenant=tenant, session=name, ends_session=ends, expected_pause_s=pause_s
        )
        return stream

    def sequence(self, stream: int) -> list[int]:
        """The prompt of a stream and its output."""
        reader = self.cluster.readers[stream]
        return [*reader.prompt, *reader.tokens]

    def serve(
        self, num_sessions: int = 6, num_turns: int = 3, tenant: str = "", *, repeats_answers: bool = True
    ) -> None:
        """Serve whole sessions, one after the other."""
        for _ in range(num_sessions):
            sequence: list[int] = []
            for _ in range(num_turns):
                stream = self.turn([*sequence, *self.new_tokens(24)], tenant=tenant)
                self.cluster.run()
                sequence = self.sequence(stream) if repeats_answers else self.cluster.readers[stream].prompt

    def fill(self, tenant: str = "", *, name: bytes = b"") -> int:
        """Start a session whose working set leaves no room, and return the stream of its first turn, which runs."""
        stream = self.turn(self.new_tokens(160), 40, tenant, name=name)
        self.cluster.plan()
        return stream

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass."""
        self.cluster.now += seconds
        self.cluster.handle(ev.TimePassed())

    @property
    def stats(self) -> SchedulerStats:
        """The metrics of the core."""
        return self.cluster.core.stats()

    @property
    def num_held(self) -> int:
        """Number of first turns that wait for memory."""
        return self.stats.waiting_by_reason["session"]


def test_a_first_turn_waits_for_memory_and_a_later_turn_passes() -> None:
    """Where turns usually follow, a new session waits while others fill the memory; the next turn of one does not."""
    agents = _Agents()
    agents.serve()
    filling = agents.fill()
    new = agents.turn(agents.new_tokens(100))

    assert agents.num_held == 1
    assert [note.text for note in agents.cluster.notes if note.stream == new][-1] == WaitReason.SESSION.value
    agents.cluster.run()
    assert agents.cluster.readers[filling].end is not None
    later = agents.turn([*agents.sequence(filling), *agents.new_tokens(8)])
    agents.cluster.run()

    assert agents.num_held == 1
    assert agents.cluster.readers[later].end is not None
    assert agents.cluster.readers[new].end is None


def test_a_prompt_that_drops_the_earlier_answer_continues_its_session() -> None:
    """Chat templates may drop the reasoning from earlier answers; later turns are recognised by the earlier prompt."""
    agents = _Agents()
    agents.serve(repeats_answers=False)
    filling = agents.fill()
    agents.turn(agents.new_tokens(100))
    assert agents.num_held == 1
    agents.cluster.run()
    agents.turn([*agents.cluster.readers[filling].prompt, *agents.new_tokens(60)])

    assert agents.num_held == 1


@pytest.mark.parametrize(
    ("num_groups", "num_blocks", "num_held"), [(1, 100, 0), (3, 100, 1), (3, 130, 0)], ids=["none", "small", "large"]
)
def test_blocks_for_windows_are_no_room_for_sequences(num_groups: int, num_blocks: int, num_held: int) -> None:
    """A session needs memory for its windows, too: two sessions that fit without windows do not fit with them."""
    worker = ModelWorker(b"w/1", num_blocks, _BLOCK, 16, num_kv_groups=num_groups, window=9, window_chunk=8)
    agents = _Agents(worker)
    agents.serve()
    agents.fill()
    agents.turn(agents.new_tokens(100))

    assert agents.num_held == num_held


def test_a_session_counts_with_the_blocks_that_it_holds() -> None:
    """The gate counts an active session with at least the blocks that its row holds, and at most a period more."""
    agents = _Agents(ModelWorker(b"w/1", 200, _BLOCK, 16, num_kv_groups=3, window=9, window_chunk=8))
    agents.fill()
    (worker,) = agents.cluster.core._fleet
    found = agents.cluster.core._requests.sessions
    assert found is not None
    assert worker.windows is not None
    tokens = found.demand(1.0, agents.cluster.now, window_need(worker))[tenant_number("")][0]
    num_held = len(np.unique(worker.held_blocks(0)))

    assert num_held <= tokens / _BLOCK <= num_held + 2 * worker.windows.period


def _pausing(pause_s: float) -> _Agents:
    """Return agents after one of them has ended a turn of 100 tokens, announced a pause, and paused for a second."""
    agents = _Agents()
    agents.serve()
    agents.turn(agents.new_tokens(92), pause_s=pause_s)
    agents.cluster.run()
    agents.tick(1.0)
    agents.tick()
    return agents


@pytest.mark.parametrize(("pause_s", "num_pausing"), [(0.0, 0), (0.4, 0), (0.6, 1), (30.0, 1)])
def test_an_announced_pause_replaces_the_learned_one(pause_s: float, num_pausing: int) -> None:
    """A session counts as ended after twice the pause that its client has announced, or the learned one of 2 ms."""
    assert _pausing(pause_s).stats.sessions.pausing == num_pausing


@pytest.mark.parametrize("num_others", [0, 1])
def test_expected_and_actual_pauses_are_counted(num_others: int) -> None:
    """The counters compare announced pauses with actual ones, even if no session has returned before."""
    agents = _Agents()
    for _ in range(num_others):
        agents.serve()
    before = agents.stats.sessions.pauses
    stream = agents.turn(agents.new_tokens(40), name=b"a", pause_s=2.0)
    agents.cluster.run()
    (shown,) = [each for each, _ in agents.cluster.core.tables().sessions if each.name == "a"]
    assert shown.pause_s == 2.0
    agents.cluster.now += 3.0
    agents.turn([*agents.sequence(stream), *agents.new_tokens(8)], name=b"a")
    after = agents.stats.sessions.pauses

    assert after.count - before.count == 1
    assert after.expected_s - before.expected_s == pytest.approx(2.0)
    assert after.actual_s - before.actual_s == pytest.approx(3.0, abs=0.1)
    assert after.error_s - before.error_s == pytest.approx(1.0, abs=0.1)


def test_the_chance_of_return_follows_from_the_announced_pause() -> None:
    """The sooner a session is expected, the more of its working set counts; one without a hint is over."""
    demands = []
    for pause_s in (60.0, 10.0, 2.0):
        agents = _pausing(pause_s)
        found = agents.cluster.core._requests.sessions
        assert found is not None
        (demand,) = found.demand(2.0, agents.cluster.now).values()
        demands.append(demand.max())

    assert 0.0 < demands[0] < demands[1] < demands[2] < 150.0
    found = _pausing(0.0).cluster.core._requests.sessions
    assert found is not None
    assert not found.demand(2.0, agents.cluster.now)


def test_a_shared_prefix_does_not_make_a_session() -> None:
    """Single turns with a common system prompt do not count as turns of one session."""
    agents = _Agents()
    system = agents.new_tokens(60)
    for _ in range(12):
        agents.turn([*system, *agents.new_tokens(40)])
        agents.cluster.run()
    agents.fill()
    agents.turn([*system, *agents.new_tokens(100)])

    assert agents.num_held == 0


def test_a_first_turn_starts_after_the_longest_wait() -> None:
    """The wait for memory is bounded, and the counters say how it ended."""
    agents = _Agents()
    agents.serve()
    agents.fill()
    new = agents.turn(agents.new_tokens(40))
    agents.tick(_WAIT_S / 2)
    assert agents.num_held == 1
    agents.tick(_WAIT_S / 2)

    assert agents.num_held == 0
    gate = agents.stats.sessions.gate
    assert (gate.held, gate.passed, gate.timed_out) == (1, 1, 1)
    assert gate.waited_s >= _WAIT_S
    agents.cluster.run()
    assert agents.cluster.readers[new].end is not None


def test_a_first_turn_starts_when_a_session_leaves_room() -> None:
    """Sessions that pause for much longer than usual no longer count."""
    agents = _Agents()
    agents.serve()
    agents.fill()
    new = agents.turn(agents.new_tokens(100))
    agents.cluster.run()
    agents.tick(_WAIT_S / 2)
    agents.cluster.run()

    assert agents.cluster.readers[new].end is not None
    assert agents.stats.sessions.gate.timed_out == 0


def test_requests_that_rarely_return_never_wait() -> None:
    """Single turns do not wait, however full the memory is."""
    agents = _Agents()
    agents.serve(num_sessions=12, num_turns=1)
    agents.fill()
    agents.turn(agents.new_tokens(100))

    assert agents.num_held == 0
    assert agents.stats.sessions.gate.held == 0


def test_a_tenant_gets_its_part_of_the_memory() -> None:
    """The sessions of one tenant do not hold back those of another that are within its equal part."""
    agents = _Agents()
    for tenant in ("greedy", "modest"):
        agents.serve(tenant=tenant)
    agents.fill("greedy")
    agents.turn(agents.new_tokens(100), tenant="greedy")
    assert agents.num_held == 1
    agents.turn(agents.new_tokens(16), tenant="modest")

    assert agents.num_held == 1


def test_a_cancelled_first_turn_leaves_the_gate() -> None:
    """A request that ends at the gate leaves nothing behind."""
    agents = _Agents()
    agents.serve()
    agents.fill()
    new = agents.turn(agents.new_tokens(100))
    agents.cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=new))

    assert agents.num_held == 0
    agents.cluster.run()


def test_without_a_longest_wait_new_sessions_start_at_once() -> None:
    """`session_wait_s` 0 turns the gate off."""
    agents = _Agents(session_wait_s=0.0)
    agents.serve()
    agents.fill()
    agents.turn(agents.new_tokens(100))

    assert agents.num_held == 0


def test_the_present_limit_names_the_memory_of_sessions() -> None:
    """The sentence about the bottleneck names the cause and the settings that help."""
    agents = _Agents()
    agents.serve()
    agents.fill()
    agents.turn(agents.new_tokens(100))

    found = present_limit(agents.cluster.core.pressure(agents.cluster.now))

    assert found.kind is LimitKind.SESSION
    assert "--session-wait-s" in found.remedy


# ---------------------------------------------------------------- names


def test_the_first_return_of_a_named_session_says_how_much_is_cached() -> None:
    """The tokens that it lost are counted, although no session of its kind has returned before."""
    agents = _Agents(session_wait_s=1.0)
    first = agents.turn(agents.new_tokens(40), name=b"agent")
    agents.cluster.run()
    agents.turn(agents.new_tokens(240))
    agents.cluster.run()

    second = agents.turn([*agents.sequence(first), *agents.new_tokens(8)], name=b"agent")
    agents.cluster.run()

    line = next(line for line in agents.cluster.story(second) if line.startswith("turn 2"))
    assert line.endswith("; on arrival, 4 of the 44 tokens that it repeats could be reused")
    assert agents.stats.sessions.lost_tokens == 40


def test_a_turn_of_a_named_session_passes_whatever_its_prompt_is() -> None:
    """A name makes a request a later turn, even if its prompt does not extend the earlier sequence."""
    agents = _Agents()
    agents.serve()
    agents.fill(name=b"agent")
    agents.cluster.run()
    agents.turn(agents.new_tokens(180), name=b"agent")
    agents.turn(agents.new_tokens(100), name=b"other")

    assert agents.num_held == 1


def test_a_name_is_valid_only_for_its_tenant() -> None:
    """A tenant cannot pass the gate with the name of another tenant's session."""
    agents = _Agents()
    for tenant in ("a", "b"):
        agents.serve(tenant=tenant)
    agents.fill("a", name=b"agent")
    agents.cluster.run()
    agents.turn(agents.new_tokens(180), tenant="a", name=b"agent")
    agents.turn(agents.new_tokens(180), tenant="b", name=b"agent")

    assert agents.num_held == 1


def test_a_retry_of_a_first_turn_that_was_held_waits_again() -> None:
    """A request that ended at the gate has not started its session, so that its name does not open the gate."""
    agents = _Agents()
    agents.serve()
    agents.fill()
    before = agents.stats.sessions
    prompt = agents.new_tokens(100)
    first = agents.turn(prompt, name=b"agent")
    agents.cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=first))
    assert agents.num_held == 0
    assert agents.stats.sessions.pausing == before.pausing
    agents.turn(prompt, name=b"agent")

    assert agents.num_held == 1
    assert agents.stats.sessions.later_turns == before.later_turns


def test_requests_with_the_name_of_a_held_first_turn_wait_as_well() -> None:
    """Two first requests of one session cannot pass the gate because they arrive together; both end."""
    agents = _Agents()
    agents.serve()
    agents.fill()
    streams = [agents.turn(agents.new_tokens(60), name=b"agent") for _ in range(2)]

    assert agents.num_held == 2
    agents.tick(_WAIT_S)
    agents.cluster.run()
    assert all(agents.cluster.readers[stream].end is not None for stream in streams)


def test_a_name_given_in_a_later_turn_is_the_name_of_the_session() -> None:
    """A session that was recognised by its content takes the name that a client gives it in a later turn."""
    agents = _Agents()
    agents.serve()
    first = agents.turn(agents.new_tokens(40))
    agents.cluster.run()
    agents.turn([*agents.sequence(first), *agents.new_tokens(20)], name=b"agent")
    agents.cluster.run()
    agents.fill()
    agents.turn(agents.new_tokens(100), name=b"agent")
    assert agents.num_held == 0
    agents.turn(agents.new_tokens(100), name=b"other")

    assert agents.num_held == 1


def test_a_short_turn_after_a_long_shared_prefix_frees_no_room_for_others() -> None:
    """A named session that no longer repeats the prefix that it shared at first needs no memory, but not less."""
    agents = _Agents()
    agents.serve()
    shared = agents.new_tokens(120)
    agents.turn([*shared, *agents.new_tokens(20)], ends=True)
    agents.cluster.run()
    agents.turn([*shared, *agents.new_tokens(20)], name=b"agent")
    agents.cluster.run()
    agents.turn(agents.new_tokens(24), name=b"agent")
    found = agents.cluster.core._requests.sessions
    assert found is not None
    request = next(iter(agents.cluster.core._requests))

    assert found.own_demand(request).min() >= 0.0


def test_a_session_that_ends_leaves_its_room_at_once() -> None:
    """After the last turn, the next new session starts without waiting for the usual pause."""
    agents = _Agents()
    agents.serve()
    agents.turn(agents.new_tokens(160), 40, ends=True)
    agents.cluster.run()
    agents.turn(agents.new_tokens(100))

    assert agents.num_held == 0


def test_a_tenant_with_many_sessions_drops_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the table is full, a tenant with many single turns does not displace another tenant's session."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 8)
    agents = _Agents()
    stream = agents.turn(agents.new_tokens(8), tenant="modest")
    agents.cluster.run()
    for _ in range(12):
        agents.turn(agents.new_tokens(8), tenant="greedy")
        agents.cluster.run()
    found = agents.cluster.core._requests.sessions
    assert found is not None
    agents.turn([*agents.sequence(stream), *agents.new_tokens(8)], tenant="modest")
    request = next(iter(agents.cluster.core._requests))

    assert found._sessions[request.session].turn == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("is_last_to_end", [False, True])
@pytest.mark.parametrize(
    "ends_of_turns", [(False, True), (True, False), (False, False, True), (True, False, False)], ids=str
)
def test_the_last_turn_ends_the_session_of_its_name(is_last_to_end: bool, ends_of_turns: tuple[bool, ...]) -> None:
    """A last turn that runs concurrently with other turns of its session ends the whole session."""
    agents = _Agents()
    for ends in ends_of_turns:
        length = 24 if ends and is_last_to_end else 8 if ends else 16
        agents.turn(agents.new_tokens(40), length, name=b"agent", ends=ends)
    agents.cluster.run()
    agents.cluster.core._requests.sessions.validate()  # type: ignore[union-attr]

    assert (agents.stats.sessions.active, agents.stats.sessions.pausing) == (0, 0)


def test_tokens_that_are_evicted_before_a_later_turn_is_admitted_are_lost() -> None:
    """What a turn repeats may be cached when it arrives and evicted while it waits."""
    agents = _Agents(session_wait_s=1.0)
    first = agents.turn(agents.new_tokens(40))
    agents.cluster.run()
    agents.turn(agents.new_tokens(240))
    agents.turn([*agents.sequence(first), *agents.new_tokens(8)])
    assert agents.stats.sessions.later_turns == 1
    assert agents.stats.sessions.lost_tokens == 0
    agents.cluster.run()

    assert agents.stats.sessions.lost_tokens > 0


def test_a_later_turn_says_how_much_of_its_session_is_cached() -> None:
    """The history of a later turn names the turn and the pause, and the metrics count the tokens that were lost."""
    agents = _Agents(session_wait_s=1.0)
    first = agents.turn(agents.new_tokens(40))
    agents.cluster.run()
    agents.cluster.now += 5.0
    second = agents.turn([*agents.sequence(first), *agents.new_tokens(8)])
    agents.cluster.run()
    assert agents.stats.sessions.lost_tokens == 0
    agents.turn(agents.new_tokens(240))
    agents.cluster.run()
    third = agents.turn([*agents.sequence(second), *agents.new_tokens(8)])
    agents.cluster.run()

    lines = {
        stream: next(line for line in agents.cluster.story(stream) if line.startswith("turn"))
        for stream in (second, third)
    }
    cached = "on arrival, 44 of the 44 tokens that it repeats could be reused"
    assert lines[second] == f"turn 2 of its session, after a pause of 5.0 s; {cached}"
    assert lines[third].startswith("turn 3 of its session")
    stats = agents.stats.sessions
    assert stats.later_turns == 2
    assert stats.lost_tokens > 0
    assert (stats.active, stats.pausing) == (0, 2)
