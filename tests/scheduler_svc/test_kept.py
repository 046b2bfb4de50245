"""What the core keeps of requests whose clients may come back, and for how long."""

import numpy as np
import pytest

from scheduler_svc.core import effects as ef
from scheduler_svc.core import events as ev
from scheduler_svc.core.kept import KeptLogs
from scheduler_svc.core.records import Log
from scheduler_svc.sim.model_worker import ModelWorker
from scheduler_svc.sim.oracle import expected_output
from tests.scheduler_svc.cluster import FRONTEND, Cluster

PROMPT = [1, 2, 3]


def _cluster(**limits: object) -> Cluster:
    cluster = Cluster(**limits)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    return cluster


def _resume(cluster: Cluster, identity: bytes) -> Log | None:
    effects = cluster.handle(ev.ResumeAsked(frontend=FRONTEND, number=7, identity=identity))
    (answer,) = [effect for effect in effects if isinstance(effect, ef.ResumeAnswered)]
    assert (answer.frontend, answer.number) == (FRONTEND, 7)
    return answer.log


def _output(log: Log | None) -> list[int]:
    assert log is not None
    tokens: list[int] = np.frombuffer(log.tokens, "<i4").tolist()
    assert tokens[: len(PROMPT)] == PROMPT
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("how", ["left", "front end lost", "taken over"])
def test_an_interrupted_request_goes_on_from_its_log(how: str) -> None:
    """Whether its client left, its front end died or another call came first: what was generated is kept, nothing more
    is computed, and submitted again with it the request ends with the model's own tokens."""
    cluster = _cluster()
    first = cluster.submit(1, PROMPT, 30, identity=b"i")
    for _ in range(9):
        cluster.plan()
        cluster.answer()
    match how:
        case "left":
            cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1, keep=True))
        case "front end lost":
            cluster.handle(ev.FrontendLost(frontend=FRONTEND))
            cluster.handle(ev.FrontendJoined(frontend=FRONTEND))
    log = _resume(cluster, b"i")
    assert first.end is not None
    assert first.end.reason is ef.EndReason.CANCELLED
    cluster.run()

    assert log is not None
    assert log.end is None
    output = _output(log)
    assert output == first.tokens
    second = cluster.submit(2, PROMPT, 30, identity=b"i", again=True, delivered=tuple(output))
    cluster.run()
    assert second.tokens == expected_output(PROMPT, 30, set())
    ended = _resume(cluster, b"i")
    assert _output(ended) == second.tokens
    assert ended is not None
    assert ended.end is not None
    assert ended.end.reason is ef.EndReason.LENGTH


def test_an_id_is_taken_while_anything_is_known_of_it() -> None:
    """A second request with it is a duplicate, live or kept; what says that it comes again takes over."""
    cluster = _cluster()
    first = cluster.submit(1, PROMPT, 30, identity=b"i")
    second = cluster.submit(2, PROMPT, 30, identity=b"i")
    other = cluster.submit(3, PROMPT, 3, identity=b"j")
    nameless = [cluster.submit(stream, PROMPT, 3) for stream in (4, 5)]
    assert second.end is not None
    assert second.end.reason is ef.EndReason.DUPLICATE
    assert first.end is None

    third = cluster.submit(6, PROMPT, 30, identity=b"i", again=True)
    assert first.end is not None
    cluster.run()
    assert all(reader.end is not None and len(reader.tokens) == 3 for reader in (other, *nameless))
    assert third.tokens == expected_output(PROMPT, 30, set())
    fourth = cluster.submit(7, PROMPT, 30, identity=b"i")
    assert fourth.end is not None
    assert fourth.end.reason is ef.EndReason.DUPLICATE
    assert _resume(cluster, b"i") is not None


def test_what_is_ended_on_purpose_or_failed_leaves_nothing() -> None:
    """Nothing is kept of a request that its client dropped, live or ended, nor of one that can never run."""
    cluster = _cluster()
    live = cluster.submit(1, PROMPT, 30, identity=b"live")
    cluster.submit(2, PROMPT, 2, identity=b"ended")
    cluster.submit(3, [], 2, identity=b"invalid")
    left = cluster.submit(4, PROMPT, 30, identity=b"left")
    cluster.plan()
    cluster.answer()
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=4))
    for _ in range(5):
        cluster.plan()
        cluster.answer()
    assert cluster.core.knows(b"live")
    assert cluster.core.knows(b"ended")
    cluster.handle(ev.RequestsDropped(identities=(b"live", b"ended", b"never")))

    assert live.end is not None
    assert left.end is not None
    assert not any(map(cluster.core.knows, (b"live", b"ended", b"invalid", b"left")))
    assert _resume(cluster, b"ended") is None
    cluster.run()


def test_logs_are_bounded_in_time_and_bytes() -> None:
    """The oldest goes when the memory is used up, and each when it is too old; the account is exact."""
    cluster = _cluster(resume_keep_s=10.0)
    cluster.submit(1, PROMPT, 3, identity=b"i")
    cluster.run()
    log = _resume(cluster, b"i")
    assert log is not None
    cluster.now += 11
    cluster.handle(ev.TimePassed())
    assert _resume(cluster, b"i") is None

    kept = KeptLogs(10.0, 3 * log.size)
    for number in range(5):
        kept.put(b"%d" % number, log, float(number))
    kept.put(b"3", log, 6.0)
    assert [b"%d" % number in kept for number in range(5)] == [False, False, True, True, True]
    assert kept.num_bytes == 3 * log.size
    kept.time_passed(14.5)
    assert len(kept) == 1
    assert kept.drop(b"3")
    assert not kept.drop(b"3")
    assert kept.num_bytes == 0
