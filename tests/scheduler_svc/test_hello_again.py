"""When a worker sends another Hello, it states the reason, which decides what happens to its requests and its drain."""

import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.workers.quarantine import FATAL_ALONE, FATAL_STEPS, PROBATION
from shared.frames import TOKEN_BYTES
from tests.scheduler_svc.cluster import FRONTEND, Cluster

SURVIVED = [ev.HelloReason.SESSION_LOST, ev.HelloReason.PROTOCOL_ERROR]
DIED = [ev.HelloReason.STARTED, ev.HelloReason.STEP_FAILED]


class OneWorker:
    """A cluster with one worker, which sends each Hello with a new incarnation."""

    def __init__(self, **limits: object) -> None:
        self.cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64, **limits)
        self._incarnation = 0
        self.hello(ev.HelloReason.STARTED)

    @property
    def draining(self) -> list[bool]:
        """Return for each worker whether it is drained."""
        return [worker.draining for worker in self.cluster.core.stats().workers]

    def hello(self, reason: ev.HelloReason) -> None:
        """The worker drops its steps in flight and sends another Hello."""
        for answers in self.cluster.answers.values():
            answers.clear()
        self._incarnation += 1
        self.cluster.join(ModelWorker(b"w/%d" % self._incarnation, 200, 4, 8), reason=reason)

    def lose(self) -> None:
        """The worker's connection is gone."""
        self.cluster.lose(b"w/%d" % self._incarnation)

    def step(self, count: int = 1) -> None:
        """Plan and answer a number of steps."""
        for _ in range(count):
            self.cluster.plan()
            self.cluster.answer()

    def fatal_steps(self, stream: int) -> int:
        """Return the number of fatal steps in the story of a request."""
        story = [line for line in self.cluster.story(stream) if "fatal step" in line or "left" in line]
        return int(story[-1].split(": ")[-1].split()[0].rstrip(",")) if story else 0


@pytest.mark.parametrize("is_lost_before", [False, True])
@pytest.mark.parametrize("reason", [*SURVIVED, ev.HelloReason.STEP_FAILED])
def test_a_drain_survives_the_hello_of_the_same_process(reason: ev.HelloReason, is_lost_before: bool) -> None:
    """Until an operator resumes it, whatever happens to its connection."""
    one = OneWorker()
    one.cluster.handle(ev.DrainRequested(worker_id="w", move=False))
    if is_lost_before:
        one.lose()
    one.hello(reason)
    assert one.draining == [True]
    one.cluster.handle(ev.ResumeRequested(worker_id="w"))
    one.hello(reason)
    assert one.draining == [False]


def test_a_drained_worker_that_is_lost_can_be_resumed_before_it_is_back() -> None:
    """Only the operator ends a drain, even if the worker is not connected at that time."""
    one = OneWorker()
    one.cluster.handle(ev.DrainRequested(worker_id="w", move=False))
    one.lose()
    one.cluster.handle(ev.ResumeRequested(worker_id="w"))
    one.hello(ev.HelloReason.SESSION_LOST)
    assert one.draining == [False]


def test_the_successor_of_a_drained_process_serves() -> None:
    """A drain, an upgrade, and a new process under the old name: it takes requests."""
    one = OneWorker()
    one.cluster.handle(ev.DrainRequested(worker_id="w", move=False))
    one.lose()
    one.hello(ev.HelloReason.STARTED)
    assert one.draining == [False]


@pytest.mark.parametrize("is_lost_before", [False, True])
@pytest.mark.parametrize("reason", SURVIVED)
def test_a_worker_that_did_not_die_makes_no_suspects(reason: ev.HelloReason, is_lost_before: bool) -> None:
    """Requests do not become suspects when the scheduler was blocked, the network failed or a message was invalid.

    They continue together at once.
    """
    one = OneWorker()
    readers = [one.cluster.submit(stream, [stream + 1, 2, 3], 40) for stream in range(4)]
    for _ in range(FATAL_STEPS + FATAL_ALONE + 1):
        one.step(2)
        one.cluster.plan()
        if is_lost_before:
            one.lose()
        one.hello(reason)
        assert [one.fatal_steps(stream) for stream in range(4)] == [0] * 4
    one.step()
    assert one.cluster.core.stats().running == 4
    one.cluster.run()
    assert all(reader.end is not None and len(reader.tokens) == 40 for reader in readers)


@pytest.mark.parametrize("reason", DIED)
def test_a_step_that_a_worker_died_of_is_held_against_its_requests(reason: ev.HelloReason) -> None:
    """A new process under the old name, or a step that failed in the worker: the requests may be at fault."""
    one = OneWorker()
    one.cluster.submit(1, [1, 2, 3], 40)
    one.step(2)
    one.cluster.plan()
    one.hello(reason)
    assert one.fatal_steps(1) == 1


@pytest.mark.parametrize("reason", SURVIVED)
def test_the_successor_of_a_dead_process_does_not_clear_requests(reason: ev.HelloReason) -> None:
    """Requests suspected of killing a process remain suspects when the next process loses its session."""
    one = OneWorker()
    one.cluster.submit(1, [1, 2, 3], 40)
    one.step(2)
    one.cluster.plan()
    one.lose()
    one.hello(ev.HelloReason.STARTED)
    one.hello(reason)
    assert one.fatal_steps(1) == 1


def test_a_reader_without_credit_does_not_clear_its_suspect() -> None:
    """A suspect whose client reads nothing waits, and still runs alone when the client continues."""
    one = OneWorker()
    suspect = one.cluster.submit(1, [1, 2, 3], 40, credit=4)
    for _ in range(FATAL_STEPS):
        one.cluster.plan()
        one.hello(ev.HelloReason.STARTED)
    others = [one.cluster.submit(stream, [stream, 2, 3], 40) for stream in (2, 3)]
    one.step(6)
    assert len(suspect.tokens) == 1 < PROBATION
    assert all(reader.tokens for reader in others)
    one.cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=1, credit=400))
    one.step()
    while len(suspect.tokens) == 1:
        one.cluster.plan()
        plan = one.cluster.plans[-1]
        is_alone = plan.num_decodes + len(plan.chunk_rows) == 1
        one.cluster.answer()
    assert is_alone
    one.cluster.run()
    assert all(reader.end is not None and len(reader.tokens) == 40 for reader in (suspect, *others))


def test_a_drained_worker_that_reconnects_does_not_prolong_the_wait_for_a_worker() -> None:
    """Requests wait for a usable worker as long as the configuration says, however often a drained one says hello."""
    one = OneWorker(worker_wait_s=1.0)
    one.cluster.handle(ev.DrainRequested(worker_id="w", move=False))
    reader = one.cluster.submit(1, [1, 2], 3)
    for _ in range(5):
        one.cluster.now += 0.4
        one.hello(ev.HelloReason.SESSION_LOST)
        one.cluster.handle(ev.TimePassed())

    assert reader.end is not None
    assert reader.end.reason is ef.EndReason.NO_WORKER


def test_a_request_that_is_in_no_step_in_flight_is_not_blamed() -> None:
    """A request without credit, preempted while a step of another request is in flight, has no part in that step."""
    cluster = Cluster(policy="priority", max_num_seqs=2, max_num_batched_tokens=16, max_plans_in_flight=2)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    cluster.submit(1, [1, 1], 40, credit=2 * TOKEN_BYTES)
    cluster.submit(2, [2] * 8, 40)
    for _ in range(6):
        cluster.plan()
        cluster.answer()
    cluster.plan()
    cluster.submit(3, [3], 5, priority=5)
    cluster.answer()
    cluster.plan()
    cluster.lose(b"w/1")

    stories = {stream: cluster.story(stream) for stream in (1, 2)}
    assert any("preempted" in line for line in stories[1])
    assert not any("fatal step" in line for line in stories[1])
    assert any("fatal step" in line for line in stories[2])
