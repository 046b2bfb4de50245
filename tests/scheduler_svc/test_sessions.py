"""What the gate for new sessions promises: later turns pass, first turns wait for memory, and every wait ends."""

from itertools import count

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import WaitReason
from scheduler_svc.core.lifecycle.statistics import SchedulerStats
from scheduler_svc.present_limit import LimitKind, present_limit
from tests.scheduler_svc.cluster import FRONTEND, Cluster

_BLOCK = 4
_NUM_BLOCKS = 64
"""Blocks of the worker: 256 tokens."""
_WAIT_S = 30.0


class _Agents:
    """Sessions on a cluster of one worker. Each turn extends the whole sequence of the turn before."""

    def __init__(self, **limits: object) -> None:
        self.cluster = Cluster(**({"session_wait_s": _WAIT_S} | limits))
        self.cluster.join(ModelWorker(b"w/1", _NUM_BLOCKS, _BLOCK, 16))
        self._streams = count(1)
        self._tokens = count(1)

    def new_tokens(self, number: int) -> list[int]:
        """Tokens that no earlier sequence has at this place."""
        first = next(self._tokens) * 37
        return [(first + index) % 997 for index in range(number)]

    def turn(self, sequence: list[int], max_tokens: int = 8, tenant: str = "") -> int:
        """Submit a prompt, and return its stream."""
        stream = next(self._streams)
        self.cluster.submit(stream, sequence, max_tokens, tenant=tenant)
        return stream

    def sequence(self, stream: int) -> list[int]:
        """The prompt of a stream and its output."""
        reader = self.cluster.readers[stream]
        return [*reader.prompt, *reader.tokens]

    def serve(self, num_sessions: int = 6, num_turns: int = 3, tenant: str = "") -> None:
        """Serve whole sessions, one after the other."""
        for _ in range(num_sessions):
            sequence: list[int] = []
            for _ in range(num_turns):
                stream = self.turn([*sequence, *self.new_tokens(8)], tenant=tenant)
                self.cluster.run()
                sequence = self.sequence(stream)

    def fill(self, tenant: str = "") -> int:
        """Start a session whose working set leaves no room, and return the stream of its first turn, which runs."""
        stream = self.turn(self.new_tokens(160), 40, tenant)
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
    gate = agents.stats.gate
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
    assert agents.stats.gate.timed_out == 0


def test_requests_that_rarely_return_never_wait() -> None:
    """Single turns do not wait, however full the memory is."""
    agents = _Agents()
    agents.serve(num_sessions=12, num_turns=1)
    agents.fill()
    agents.turn(agents.new_tokens(100))

    assert agents.num_held == 0
    assert agents.stats.gate.held == 0


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
