"""When a plan goes out: just in time, earlier after the worker had to wait, together with others nearly due."""

from dataclasses import replace

import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.workers.plan_timing import EARLY_S, LEAD_S, TOLERATED_IDLE, PlanTiming
from tests.scheduler_svc.cluster import Cluster

STEP_S = 0.1


def test_a_plan_goes_out_before_the_step_can_be_over() -> None:
    """The margin is `LEAD_S` at first; a step with an unknown duration gets its successor at once."""
    timing = PlanTiming()

    assert timing.lead(STEP_S) == pytest.approx(STEP_S - LEAD_S)
    assert timing.lead(0.0) == 0.0


def test_a_worker_that_waited_gets_its_plans_earlier_for_a_while() -> None:
    """The margin grows by the wait at once, and is back after some hundred steps without one."""
    timing = PlanTiming()

    timing.idled(STEP_S, 0.01)

    assert timing.lead(STEP_S) == pytest.approx(STEP_S - LEAD_S - 0.01)
    timing.idled(STEP_S, 0.0)
    assert timing.lead(STEP_S) == pytest.approx(STEP_S - LEAD_S - 0.01 * 0.99)
    for _ in range(1000):
        timing.idled(STEP_S, 0.0)
    assert timing.lead(STEP_S) == pytest.approx(STEP_S - LEAD_S, abs=1e-4)


def test_the_margin_has_bounds() -> None:
    """What a device idles between any two steps is no wait, and no wait makes the margin longer than a step."""
    timing = PlanTiming()
    for _ in range(100):
        timing.idled(STEP_S, TOLERATED_IDLE * STEP_S)
    assert timing.lead(STEP_S) == pytest.approx(STEP_S - LEAD_S)

    for _ in range(100):
        timing.idled(STEP_S, 10.0)
    assert timing.lead(STEP_S) == 0.0
    for _ in range(100):
        timing.idled(STEP_S, 0.0)
    assert timing.lead(STEP_S) > STEP_S / 2


class SteadyWorker:
    """A worker in a cluster whose steps all take `STEP_S`."""

    def __init__(self, index: int = 0, cluster: Cluster | None = None) -> None:
        self.cluster = cluster or Cluster(max_num_seqs=4, max_num_batched_tokens=64)
        self.peer = b"w/%d" % index
        self.cluster.join(ModelWorker(self.peer, 1000, 4, 8), f"w{index}")

    def step(self, idle_s: float = 0.0) -> float:
        """Plan as far as the core permits and complete the oldest step; return how long the core then wants to wait."""
        cluster = self.cluster
        begin = cluster.now
        cluster.plan()
        answer = replace(cluster.answers[self.peer].popleft(), idle_s=idle_s)
        cluster.now = max(cluster.now, begin + STEP_S) - 0.001
        cluster.handle(answer)
        due = cluster.core.next_plan_due(cluster.now)
        return due - cluster.now if due is not None else 0.0


def test_a_wait_for_a_plan_that_could_have_come_earlier_counts() -> None:
    """If a worker with continuing rows was idle before a step, its next plans are sent earlier."""
    worker = SteadyWorker()
    worker.cluster.submit(1, [1, 2], 300)
    pauses = [worker.step() for _ in range(100)]

    assert pauses[-1] == pytest.approx(STEP_S - LEAD_S, abs=0.005)
    worker.step(idle_s=0.03)
    assert worker.step() == pytest.approx(pauses[-1] - 0.03, abs=0.005)


def test_idling_for_want_of_requests_counts_for_nothing() -> None:
    """The first plan after a time without requests could not have come earlier."""
    worker = SteadyWorker()
    worker.cluster.submit(1, [1, 2], 100)
    pauses = [worker.step() for _ in range(99)]
    worker.cluster.run()
    worker.cluster.now += 10.0

    worker.cluster.submit(2, [1, 2], 100)
    worker.step(idle_s=10.0)

    assert worker.step() == pytest.approx(pauses[-10], abs=0.005)


def test_plans_that_are_nearly_due_go_out_together() -> None:
    """One turn plans for every worker whose plan is due within `EARLY_S`."""
    first = SteadyWorker(0)
    second = SteadyWorker(1, first.cluster)
    cluster = first.cluster
    for stream in range(4):
        cluster.submit(stream, [stream, 2], 300)
    for _ in range(60):
        cluster.plan()
        cluster.now += STEP_S
        for worker in (first, second):
            cluster.now -= 0.0009
            cluster.handle(cluster.answers[worker.peer].popleft())
    due = cluster.core.next_plan_due(cluster.now)
    assert due is not None

    assert cluster.core.due_workers(due - 2 * EARLY_S) == []
    assert cluster.core.due_workers(due) == [first.peer, second.peer]
    assert cluster.core.plan(second.peer, due)[0] is not None
