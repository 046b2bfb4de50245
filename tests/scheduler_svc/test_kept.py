"""What the core retains for requests whose clients may return, and for how long."""

from typing import Any

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import SCORED, expected_output, scores_of
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import TenantLimits
from scheduler_svc.core.interface.records import Log
from scheduler_svc.core.requests.kept import KeptLogs
from shared.columns import to_column
from shared.request_spec import RequestSpec
from tests.scheduler_svc.cluster import FRONTEND, Cluster, Reader
from tests.scheduler_svc.requests import make_arrival

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
    """An interrupted request retains its tokens, and continues with the model's own tokens after it is submitted again.

    The client left, the front end died, or another call took over. In the meantime nothing is computed.
    """
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


def test_log_probabilities_beyond_the_tokens_of_a_client_are_replaced() -> None:
    """A client with fewer tokens than the log gets one log-probability entry per token after it continues."""
    spec = RequestSpec(request_id="r", num_prompt_tokens=3, max_tokens=8, identity=b"i", sampling=SCORED)
    output = expected_output(PROMPT, 8, set())
    scores = tuple((index, scores_of([output[index]])) for index in range(5))
    log = Log(spec=spec, tokens=to_column([*PROMPT, *output[:5]]), scores=scores, end=None)
    cluster = _cluster()
    cluster.handle(ev.LogsRestored(logs=((0.0, log),)))

    reader = cluster.submit(1, PROMPT, 8, identity=b"i", sampling=SCORED, again=True, delivered=tuple(output[:3]))
    cluster.run()
    assert reader.tokens == output
    kept = _resume(cluster, b"i")
    assert kept is not None
    assert [index for index, _ in kept.scores] == list(range(8))


def test_an_id_is_taken_while_anything_is_known_of_it() -> None:
    """A second request with a running or stored id is a duplicate; a resubmission takes over."""
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


def test_a_dropped_or_failed_request_leaves_no_log() -> None:
    """No log is retained if a client dropped its request, live or ended, or if the request can never run."""
    cluster = _cluster()
    live = cluster.submit(1, PROMPT, 30, identity=b"live")
    cluster.submit(2, PROMPT, 2, identity=b"ended")
    cluster.submit(3, [-1], 2, identity=b"invalid")
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
    """The oldest log is dropped when the memory is used up, and each log when it is too old.

    The accounting is exact.
    """
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


def test_a_client_that_is_told_to_retry_finds_its_log_again() -> None:
    """Going on is refused while the queue is full: the log stays as it was and for as long, and the retry succeeds."""
    cluster = _cluster(max_num_seqs=1, max_num_batched_tokens=16, max_queued_requests=1, resume_keep_s=100.0)
    first = cluster.submit(1, PROMPT, 30, identity=b"i")
    for _ in range(9):
        cluster.plan()
        cluster.answer()
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1, keep=True))
    cluster.submit(2, PROMPT, 20)
    cluster.plan()
    cluster.submit(3, PROMPT, 20)
    log = _resume(cluster, b"i")
    num_effects = len(cluster.effects)

    refused = cluster.submit(4, PROMPT, 30, identity=b"i", again=True, delivered=tuple(first.tokens))

    assert [type(effect) for effect in cluster.effects[num_effects:]] == [ef.RequestEnded]
    assert refused.end is not None
    assert (refused.end.reason, refused.end.retry_ms > 0) == (ef.EndReason.QUEUE_FULL, True)
    assert _resume(cluster, b"i") == log
    cluster.run()
    second = cluster.submit(5, PROMPT, 30, identity=b"i", again=True, delivered=tuple(_output(_resume(cluster, b"i"))))
    cluster.run()
    assert second.tokens == expected_output(PROMPT, 30, set())


def test_a_refused_call_does_not_prolong_a_log() -> None:
    """However often going on is refused, the log is given up when its time is over."""
    cluster = _cluster(max_num_seqs=1, max_num_batched_tokens=16, max_queued_requests=1, resume_keep_s=10.0)
    cluster.submit(1, PROMPT, 30, identity=b"i")
    cluster.plan()
    cluster.answer()
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1, keep=True))
    cluster.submit(2, PROMPT, 20)
    cluster.plan()
    cluster.submit(3, PROMPT, 20)
    for stream in range(4, 8):
        cluster.now += 2.4
        cluster.handle(ev.TimePassed())
        assert cluster.submit(stream, PROMPT, 30, identity=b"i", again=True).end is not None
        assert cluster.core.knows(b"i")
    cluster.now += 1.0
    cluster.handle(ev.TimePassed())
    assert not cluster.core.knows(b"i")


def _come_and_go(cluster: Cluster, streams: range, **request: object) -> Reader:
    """A client leaves and comes back again and again, each time after one more step, then stays."""
    reader = cluster.submit(streams[0], PROMPT, 40, identity=b"i", **request)  # type: ignore[arg-type]
    for stream in streams[1:]:
        cluster.plan()
        cluster.answer()
        cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=stream - 1, keep=True))
        delivered = tuple(_output(_resume(cluster, b"i")))
        reader = cluster.submit(stream, PROMPT, 40, identity=b"i", again=True, delivered=delivered, **request)  # type: ignore[arg-type]
    return reader


@pytest.mark.parametrize("chunk", [2, 64], ids=["left before its first token", "left after it"])
def test_a_tenant_pays_once_for_a_request_that_goes_on(chunk: int) -> None:
    """A tenant pays once for the prompt and for each token of a request, however often its client resumes it."""
    limits = {"a": TenantLimits(tokens_per_s=10.0)}
    cluster = _cluster(max_num_seqs=2, max_num_batched_tokens=chunk, tenant_limits=limits, prefix_cache="off")
    reader = _come_and_go(cluster, range(1, 9), tenant="a")
    cluster.run()
    assert reader.tokens == expected_output(PROMPT, 40, set())

    # The bucket held 100 tokens. 43 were taken before, 56 are taken now, and about 2 were added over time.
    fits = [cluster.submit(10, [5] * 50, 2, tenant="a"), cluster.submit(11, PROMPT, 1, tenant="a")]
    cluster.run()
    overdrawn = cluster.submit(12, [5] * 20, 1, tenant="a")
    cluster.run()
    blocked = cluster.submit(13, PROMPT, 1, tenant="a")
    cluster.run()
    assert [bool(reader.end) for reader in (*fits, overdrawn, blocked)] == [True, True, True, False]


def test_a_request_that_goes_on_is_served_once_in_its_tenants_account() -> None:
    """Under `fair`, tokens that were delivered before a client resumes do not count again.

    Its tenant's next turn comes before that of a tenant with more service.
    """
    cluster = _cluster(policy="fair", max_num_seqs=1, max_num_batched_tokens=64)
    _come_and_go(cluster, range(1, 9), tenant="a")
    cluster.run()
    cluster.submit(20, PROMPT, 60, tenant="z")
    cluster.run()
    cluster.submit(30, PROMPT, 20, tenant="other")
    cluster.plan()
    more_served, less_served = (cluster.submit(31 + i, PROMPT, 5, tenant=tenant) for i, tenant in enumerate("za"))
    while not (more_served.tokens or less_served.tokens):
        cluster.plan()
        cluster.answer()
    assert (more_served.tokens, less_served.tokens) == ([], expected_output(PROMPT, 1, set()))


def test_the_size_of_a_log_includes_its_opaque_parts() -> None:
    """Every opaque part of a submission counts towards the memory limit for retained logs."""

    def size(**changes: Any) -> int:
        return Log(
            spec=make_arrival(FRONTEND, tokens=1, max_tokens=1, credit=0, **changes).spec,
            tokens=b"",
            scores=(),
            end=None,
        ).size

    for part in ("sampling", "grammar", "resume_info"):
        assert size(**{part: b"x" * 100}) == size() + 100
