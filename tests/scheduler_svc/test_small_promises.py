"""Promises of the core that are too small for a file of their own; mutants showed that nothing watched them."""

from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig, RequestClass
from scheduler_svc.core.interface.records import Log
from scheduler_svc.core.queueing.policies import LongestPrefixQueue, make_policy
from scheduler_svc.core.requests.accounts import Account, AccountNumbers
from scheduler_svc.core.requests.request import Request
from scheduler_svc.sim.model_worker import ModelWorker
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.requests import make_arrival, make_request


def _cluster(**limits: object) -> Cluster:
    cluster = Cluster(**limits)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    return cluster


def _arrived(**changes: Any) -> ev.RequestArrived:
    return make_arrival(FRONTEND, tokens=1, max_tokens=1, credit=0, **changes)


def test_a_lost_worker_is_reported_with_its_requests() -> None:
    """Whoever watches the log learns which requests wait again, and why."""
    cluster = _cluster()
    for stream in (1, 2):
        cluster.submit(stream, [stream], 9)
    cluster.plan()
    cluster.lose(b"w/1")
    emptied = [effect for effect in cluster.effects if isinstance(effect, ef.WorkerEmptied)]
    assert emptied == [ef.WorkerEmptied(worker_id="w", reason="killed", request_ids=("r1", "r2"))]


def test_an_idle_worker_learns_that_its_rows_are_over() -> None:
    """After the last answer one more plan names the rows that were left, though there is nothing to compute."""
    cluster = _cluster()
    cluster.submit(1, [1, 2], 3)
    cluster.run()
    assert cluster.workers[b"w/1"].rows == {}


def test_time_in_the_queue_ends_with_the_first_plan() -> None:
    """What is said of a request's wait does not count the time it ran."""
    cluster = _cluster()
    before = cluster.now
    reader = cluster.submit(1, [1, 2], 50)
    cluster.plan()
    planned = cluster.now
    cluster.run()
    assert reader.end is not None
    assert reader.end.queued_s <= planned - before < cluster.now - before


def test_an_answer_that_does_not_fit_blames_no_request() -> None:
    """A worker that talks nonsense is given up, and what ran there is under no suspicion."""
    cluster = _cluster()
    cluster.submit(1, [1, 2], 9)
    cluster.plan()
    wrong = cluster.answers[b"w/1"].popleft()
    wrong.step += 1
    cluster.handle(wrong)
    assert [what for _, what in cluster.core.story(FRONTEND, 1) if "fatal" in what] == []


@pytest.mark.parametrize("policy", ["priority", "sjf"])
def test_only_first_come_first_served_foresees_the_wait(policy: str) -> None:
    """Under other orders nobody knows how long a new request waits, so its deadline refuses it only once it is near."""
    cluster = Cluster(policy=policy)
    cluster.submit(1, [1], 9)
    reader = cluster.submit(2, [1], 9, deadline=cluster.now + 0.5)
    assert reader.end is None


def test_requests_of_unknown_classes_are_of_one_class() -> None:
    """Whoever names no known class waits, and is paused, with all others that do not."""
    config = CoreConfig(classes={"a": RequestClass(policy="fcfs")})
    assert config.same_class("a", "a")
    assert config.same_class("x", "y")
    assert not config.same_class("a", "x")
    assert not config.same_class("x", "a")


def test_numbers_of_accounts_are_used_again() -> None:
    """A number that nobody uses goes to the next account, however often it has changed hands."""
    numbers = AccountNumbers()
    for tenant in "abcd":
        number = numbers.enter(Account("", tenant))
        assert (number, numbers[number].tenant) == (0, tenant)
        numbers.leave(number)


def test_a_log_is_as_large_as_what_it_holds() -> None:
    """Every opaque part counts towards the memory that logs may take."""

    def size(**changes: Any) -> int:
        return Log(spec=_arrived(**changes).spec, tokens=b"", scores=(), end=None).size

    for part in ("sampling", "grammar", "resume_info"):
        assert size(**{part: b"x" * 100}) == size() + 100


def test_the_longest_prefix_is_looked_for_in_a_window() -> None:
    """As many of the oldest requests are ranked as is stated, and no more; none is lost when they are put back."""
    queue = LongestPrefixQueue()
    for sequence in range(80):
        queue.push(make_request(sequence))
    ranked: set[int] = set()

    def cached(request: Request) -> int:
        ranked.add(request.sequence)
        return 0

    first = queue.take(cached)
    assert ranked == set(range(queue.WINDOW))
    second = queue.take(cached)
    assert first is not None
    assert second is not None
    queue.take(cached)
    queue.push(second)
    queue.push(first)
    assert len(queue) == 79
    taken = [request.sequence for _ in range(79) if (request := queue.take(lambda _: 0)) is not None]
    assert taken == [0, 1, *range(3, 80)]


def test_tenants_take_turns_within_a_fair_class() -> None:
    """What a tenant was served counts in the class whose order is fair, too."""
    policy = make_policy("fcfs", {}, {"c": RequestClass(policy="fair")})
    queue = policy.make_queue()
    for sequence, tenant in ((1, "a"), (2, "b")):
        policy.enter(Account("c", tenant))
        queue.push(make_request(sequence, request_class="c", tenant=tenant))
    policy.served(Account("c", "a"), prompt_tokens=10)
    served = queue.take(lambda _: 0)
    assert served is not None
    assert served.spec.tenant == "b"


def test_deadlines_hold_after_those_of_the_ended_are_forgotten() -> None:
    """However many requests with deadlines have come and gone, those that are left end when their time is up."""
    cluster = Cluster(worker_wait_s=1e6)
    order = np.random.default_rng(0).permutation(400).tolist()
    start = cluster.now
    for stream in order:
        cluster.submit(stream, [1], 9, deadline=start + 100 + stream)
        if stream % 10:
            cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=stream))
    for passed in range(0, 400, 10):
        cluster.now = start + 100 + passed + 5
        cluster.handle(ev.TimePassed())
        ended = [s for s in range(0, 400, 10) if cluster.readers[s].end is not None]
        assert ended == list(range(0, passed + 10, 10))


def test_who_has_become_hopeless_while_waiting_is_refused() -> None:
    """A request that could have met its deadline when it came, and cannot when its turn comes, is not begun."""
    cluster = _cluster(max_num_seqs=2)
    cluster.submit(1, [1], 200)
    cluster.submit(2, [2], 200)
    for _ in range(20):
        cluster.plan()
        cluster.answer()
    reader = cluster.submit(3, [3], 200, deadline=cluster.now + 10)
    assert reader.end is None
    cluster.now += 9.999
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=2))
    cluster.plan()
    assert reader.end is not None
    assert (reader.end.reason, reader.tokens) == (ef.EndReason.DEADLINE, [])


def test_every_end_counts_once() -> None:
    """The metrics tell how many requests have ended, by reason."""
    cluster = _cluster()
    for stream in range(3):
        cluster.submit(stream, [stream], 4)
    cluster.run()
    ended = {reason: count for reason, count in cluster.core.stats().ended.items() if count}
    assert ended == {ef.EndReason.LENGTH: 3}
