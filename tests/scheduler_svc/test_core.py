"""Promises of the scheduler core, one request life at a time."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from checks.sim.promises.sizes import sizes_of
from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.errors import InvalidLimitsError
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.operations import count_calls

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 16}


def _worker(num_blocks: int = 64, *, peer: bytes = b"w/1", block_size: int = 4, max_rows: int = 8) -> ModelWorker:
    return ModelWorker(peer, num_blocks, block_size, max_rows)


def _available(cluster: Cluster) -> list[tuple[int, int]]:
    return [(worker.blocks_free + worker.blocks_cached, worker.blocks_total) for worker in cluster.core.stats().workers]


def test_tokens_are_those_of_the_model() -> None:
    """Prompts longer and shorter than the budget, more of them than rows, all deliver the model's tokens."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    for stream in range(12):
        cluster.submit(stream, list(range(1, 3 + 5 * stream)), 3 + stream)
    cluster.run()
    for reader in cluster.readers.values():
        assert reader.end is not None
        assert (reader.end.reason, reader.end.retry_ms) == (ef.EndReason.LENGTH, 0)
        assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())
    assert _available(cluster) == [(64, 64)]
    generated = sum(len(reader.tokens) for reader in cluster.readers.values())
    assert cluster.core.stats().workers[0].counters.generated_tokens == generated


def test_stop_token_ends_and_later_tokens_are_discarded() -> None:
    """A stop token is the last that is delivered, although a further step was in flight."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    full = expected_output([5, 6, 7], 20, set())
    reader = cluster.submit(1, [5, 6, 7], 20, stops={full[6]})
    cluster.run()
    assert reader.tokens == expected_output([5, 6, 7], 20, {full[6]})
    assert reader.end is not None
    assert (reader.end.reason, reader.end.stop_token_id) == (ef.EndReason.STOP, full[6])
    assert cluster.core.stats().workers[0].counters.discarded_tokens == 1
    assert _available(cluster) == [(64, 64)]


def test_many_stop_tokens() -> None:
    """More stop tokens than the array holds are honoured too."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    full = expected_output([9], 30, set())
    stops = {full[10], *[token for token in range(1000) if token not in full][:20]}
    reader = cluster.submit(1, [9], 30, stops=stops)
    cluster.run()
    assert reader.tokens == expected_output([9], 30, stops)


def test_preemption_keeps_tokens_and_order() -> None:
    """With too few blocks for all, later requests are preempted and every output is still the model's."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker(num_blocks=12))
    for stream in range(4):
        cluster.submit(stream, list(range(1, 6 + stream)), 25)
    cluster.run()
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, 25, set())
    assert cluster.core.stats().workers[0].counters.preemptions > 0
    first = cluster.readers[0].end
    assert first is not None
    assert first.preemptions == 0, "the oldest request is never the victim"
    assert _available(cluster) == [(12, 12)]


def test_cancel_frees_blocks_once_steps_in_flight_are_answered() -> None:
    """No plan after a cancel samples the request, and its blocks come back with the answers in flight."""
    cluster = Cluster(**SMALL)
    worker = _worker()
    cluster.join(worker)
    reader = cluster.submit(1, [1, 2, 3], 50)
    cluster.plan()
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1))
    assert reader.end is not None
    assert reader.end.reason is ef.EndReason.CANCELLED
    assert cluster.plan() == 0
    assert _available(cluster) != [(64, 64)], "blocks must not be free while a step in flight may write them"
    cluster.run()
    assert _available(cluster) == [(64, 64)]


def test_worker_death_resumes_without_gap_or_repeat() -> None:
    """What ran on a dead worker continues on the next one from the delivered tokens."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    for stream in range(6):
        cluster.submit(stream, list(range(1, 8)), 20 + stream)
    for _ in range(9):
        cluster.plan()
        cluster.answer()
    cluster.plan()
    cluster.lose(b"w/1")
    cluster.join(_worker(peer=b"w/2"))
    cluster.run()
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())
        assert reader.end is not None
        assert reader.end.reason is ef.EndReason.LENGTH


def test_answers_of_an_old_epoch_are_dropped() -> None:
    """A worker that has sent another Hello cannot deliver results for its previous epoch."""
    cluster = Cluster(**SMALL)
    worker = _worker()
    cluster.join(worker)
    cluster.submit(1, [1, 2], 10)
    cluster.plan()
    stale = cluster.answers[b"w/1"].popleft()
    cluster.answers[b"w/1"].clear()
    cluster.join(worker)
    assert cluster.handle(stale) == []
    cluster.run()
    assert cluster.readers[1].tokens == expected_output([1, 2], 10, set())


def test_senseless_answer_ends_the_epoch_only() -> None:
    """An answer with surprising rows makes the core forget the worker, not the request."""
    cluster = Cluster(**SMALL)
    worker = _worker()
    cluster.join(worker)
    cluster.submit(1, [1, 2], 10)
    cluster.plan()
    answer = cluster.answers[b"w/1"].popleft()
    cluster.answers[b"w/1"].clear()
    wrong = ev.StepDone(worker=b"w/1", epoch=worker.epoch, step=answer.step, rows=answer.rows + 1, tokens=answer.tokens)
    assert any(isinstance(effect, ef.WorkerUnknown) for effect in cluster.handle(wrong))
    cluster.join(worker)
    cluster.run()
    assert cluster.readers[1].tokens == expected_output([1, 2], 10, set())


def test_failed_row_ends_alone() -> None:
    """A failed row ends its request with an error; other requests continue."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    cluster.submit(1, [1, 2], 10)
    cluster.submit(2, [3, 4], 10)
    cluster.plan()
    answer = cluster.answers[b"w/1"].popleft()
    failing = int(answer.rows[0])
    admitted = answer.rows.tolist().index(failing)
    keep = answer.rows != failing
    cluster.handle(
        ev.StepDone(
            worker=answer.worker,
            epoch=answer.epoch,
            step=answer.step,
            rows=answer.rows[keep],
            tokens=answer.tokens[keep],
            failures=(ev.FailedRow(row=failing, generation=1, kind=ev.FailureKind.NOT_FINITE, reason="NaN"),),
        )
    )
    assert admitted == 0
    ended = [effect for effect in cluster.effects if isinstance(effect, ef.RequestEnded)]
    assert [effect.reason for effect in ended] == [ef.EndReason.ROW_FAILED]
    cluster.run()
    survivor = cluster.readers[3 - ended[0].stream]
    assert survivor.tokens == expected_output(survivor.prompt, 10, set())


def test_a_row_without_credit_is_held_out_until_credit_comes() -> None:
    """A row stops exactly at its credit while others run, and continues when credit comes."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    slow = cluster.submit(1, [1, 2], 30, credit=4 * 7)
    fast = cluster.submit(2, [3, 4], 30)
    cluster.run()
    assert len(slow.tokens) == 7
    assert fast.end is not None
    cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=1, credit=4 * 100))
    cluster.run()
    assert slow.tokens == expected_output([1, 2], 30, set())


def test_stalled_reader_is_cancelled() -> None:
    """A client that reads nothing for the configured time ends with that reason and frees its blocks."""
    cluster = Cluster(**SMALL, stall_timeout_s=5.0)
    cluster.join(_worker())
    reader = cluster.submit(1, [1, 2], 30, credit=4 * 3)
    cluster.run()
    for _ in range(3):
        cluster.now += 4.0
        cluster.handle(ev.TimePassed())
    cluster.run()
    assert reader.end is not None
    assert reader.end.reason is ef.EndReason.STALLED
    assert _available(cluster) == [(64, 64)]


def test_deadline_ends_waiting_and_running_requests() -> None:
    """A deadline that passes ends the request wherever it is."""
    cluster = Cluster(max_num_seqs=1, max_num_batched_tokens=16)
    cluster.join(_worker())
    running = cluster.submit(1, [1, 2], 500, deadline=cluster.now + 10)
    waiting = cluster.submit(2, [1, 2], 500, deadline=cluster.now + 10)
    cluster.plan()
    cluster.now += 11
    cluster.handle(ev.TimePassed())
    assert [r.end.reason for r in (running, waiting) if r.end] == [ef.EndReason.DEADLINE] * 2
    cluster.run()
    assert _available(cluster) == [(64, 64)]


def test_full_queue_is_refused_with_a_retry_hint() -> None:
    """Beyond max_queued_requests a request ends at once, and says when to try again."""
    cluster = Cluster(max_queued_requests=2)
    readers = [cluster.submit(stream, [1], 2) for stream in range(3)]
    end = readers[2].end
    assert end is not None
    assert end.reason is ef.EndReason.QUEUE_FULL
    assert end.retry_ms > 0
    assert readers[0].end is None


def test_without_worker_requests_end_after_the_wait() -> None:
    """UNAVAILABLE comes only after the configured wait, counted from the request's arrival."""
    cluster = Cluster(worker_wait_s=30.0)
    cluster.handle(ev.TimePassed())
    cluster.now += 25
    reader = cluster.submit(1, [1], 2)
    cluster.now += 10
    cluster.handle(ev.TimePassed())
    assert reader.end is None
    cluster.now += 25
    cluster.handle(ev.TimePassed())
    assert reader.end is not None
    assert reader.end.reason is ef.EndReason.NO_WORKER


def test_overdue_step_gives_the_worker_up() -> None:
    """A worker that misses the step deadline is declared lost, and its requests wait again."""
    cluster = Cluster(**SMALL, step_deadline_s=20.0)
    cluster.join(_worker())
    cluster.submit(1, [1, 2], 10)
    cluster.plan()
    for _ in range(60):
        cluster.now += 0.45
        cluster.handle(ev.TimePassed())
    assert cluster.core.workers() == []
    assert cluster.core.stats().waiting == 1


def test_no_worker_is_removed_because_the_scheduler_was_blocked() -> None:
    """When the scheduler was blocked for longer than a step deadline, it removes no worker."""
    cluster = Cluster(**SMALL, step_deadline_s=20.0)
    cluster.join(_worker())
    cluster.submit(1, [1, 2], 10)
    cluster.plan()
    cluster.now += 300.0
    cluster.handle(ev.TimePassed())
    assert cluster.core.workers() == [b"w/1"]
    cluster.run()
    assert cluster.readers[1].tokens == expected_output([1, 2], 10, set())


def test_stop_string_discards_later_tokens() -> None:
    """A stop string ends the request with the count that the front end gives."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    reader = cluster.submit(1, [1, 2], 50)
    for _ in range(6):
        cluster.plan()
        cluster.answer()
    cluster.handle(ev.StopMatched(frontend=FRONTEND, stream=1, keep_tokens=3))
    cluster.run()
    assert reader.end is not None
    assert (reader.end.reason, reader.end.completion_tokens) == (ef.EndReason.STOP_STRING, 3)
    assert _available(cluster) == [(64, 64)]


def test_lost_frontend_takes_its_requests_along() -> None:
    """A lost front end's requests are cancelled, and everything they held is released."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    for stream in range(6):
        cluster.submit(stream, [1, 2, 3], 40)
    cluster.plan()
    cluster.handle(ev.FrontendLost(frontend=FRONTEND))
    cluster.run()
    assert all(reader.end and reader.end.reason is ef.EndReason.CANCELLED for reader in cluster.readers.values())
    assert _available(cluster) == [(64, 64)]


def test_an_unknown_front_end_must_say_hello() -> None:
    """The core accepts nothing from an unknown front end before its Hello."""
    cluster = Cluster()
    cluster.handle(ev.FrontendLost(frontend=FRONTEND))
    cluster.submit(1, [1], 2)
    assert [effect for effect in cluster.effects if isinstance(effect, ef.FrontendUnknown)]
    assert cluster.core.stats().waiting == 0


def test_two_workers_share_the_queue() -> None:
    """Requests spread over all workers, and all deliver the model's tokens."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker(), "a")
    cluster.join(_worker(peer=b"w/2"), "b")
    for stream in range(10):
        cluster.submit(stream, [stream, 2, 3], 15)
    cluster.run()
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, 15, set())
    assert all(worker.counters.steps > 0 for worker in cluster.core.stats().workers)


def test_other_model_is_refused() -> None:
    """A worker with another fingerprint cannot join while the model is in use."""
    cluster = Cluster()
    cluster.join(_worker(), "a")
    hello = _worker(peer=b"w/2").hello("b")
    other = ev.WorkerHello(
        worker=hello.worker,
        worker_id="b",
        block_size=4,
        num_blocks=4,
        max_rows=4,
        max_tokens_per_step=64,
        model=ev.ModelFacts(
            name="x", architecture="X", fingerprint="other", max_model_len=1, vocab_size=1, dtype="f", eos_token_ids=()
        ),
    )
    assert any(isinstance(effect, ef.WorkerRefused) for effect in cluster.handle(other))


def test_a_worker_without_room_for_a_sequence_is_refused() -> None:
    """A sequence needs at least one prompt token and one generated token."""
    cluster = Cluster()
    cluster.join(_worker(), "a")
    hello = _worker(peer=b"w/2").hello("b")
    for small in (
        replace(hello, model=replace(hello.model, max_model_len=1)),
        replace(hello, num_blocks=1, block_size=1),
    ):
        effects = cluster.handle(small)
        assert [type(effect) for effect in effects] == [ef.WorkerRefused]


@pytest.mark.parametrize(
    ("field", "value"), [("architecture", "X"), ("dtype", "f"), ("vocab_size", 4), ("eos_token_ids", (3,))]
)
def test_a_worker_of_another_model_is_refused(field: str, value: Any) -> None:
    """Workers with one fingerprint must agree, because front ends check requests by its values."""
    cluster = Cluster()
    cluster.join(_worker(), "a")
    hello = _worker(peer=b"w/2").hello("b")
    effects = cluster.handle(replace(hello, model=replace(hello.model, **{field: value})))
    assert [effect.reason for effect in effects if isinstance(effect, ef.WorkerRefused)] == [
        f"{field}: the worker reports {value}, but the same model is served with {getattr(hello.model, field)};"
        " start it with the same files and release"
    ]
    assert not any(isinstance(effect, ef.ServiceChanged) for effect in effects)


def test_resubmitted_request_continues_after_its_delivered_tokens() -> None:
    """A request that arrives with delivered tokens continues after them."""
    full = expected_output([4, 5], 12, set())
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    reader = cluster.submit(1, [4, 5], 12, delivered=tuple(full[:5]))
    cluster.run()
    assert reader.tokens == full


def test_contradicting_limits_are_refused() -> None:
    """Limits under which running requests could not all be in a step are refused by name."""
    with pytest.raises(InvalidLimitsError, match="max_num_batched_tokens"):
        CoreConfig(max_num_seqs=64, max_num_batched_tokens=32)


def test_an_idle_worker_gets_a_plan_that_frees_its_rows() -> None:
    """Everything that the worker keeps for a row, including spans, ends with the request instead of the next one."""
    cluster = Cluster()
    worker = ModelWorker(b"w/1", 40, 4, 8)
    cluster.join(worker)
    cluster.submit(1, [1, 2, 3], 5)
    cluster.run()
    assert not worker.rows
    assert not cluster.plan()


def test_plans_name_the_traced_requests_that_take_part() -> None:
    """A traced request is named from its first chunk to its last token, except while it is held out; others never."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    prompt = list(range(20))
    cluster.submit(1, prompt, 6, traceparent="00-t-s-01", credit=8)
    cluster.submit(2, [1, 2], 40)
    cluster.run()
    named = [plan.num_tokens for plan in cluster.plans if plan.traced_rows]
    assert {name for plan in cluster.plans for name in plan.traced_rows} == {(FRONTEND, 1)}
    # Two chunks, of which the second yields the first token, and then one more token. This uses up the credit.
    assert len(named) == 3
    cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=1, credit=100))
    cluster.run()
    assert len([plan for plan in cluster.plans if plan.traced_rows]) == 7


def test_an_admission_says_since_when_its_request_waited() -> None:
    """The time counts from its arrival at first, and after a loss from when the request waits again."""
    cluster = Cluster(**SMALL)
    cluster.join(_worker())
    arrived = cluster.now
    cluster.submit(1, [1, 2], 30)
    cluster.now += 5
    cluster.plan()
    cluster.now += 5
    lost = cluster.now
    cluster.lose(b"w/1")
    cluster.now += 5
    cluster.join(_worker(peer=b"w/2"))
    cluster.run()
    first, second = (admission.queued_since for plan in cluster.plans for admission in plan.admissions)
    assert arrived <= first < arrived + 1
    assert lost <= second < lost + 1


def test_a_plan_does_not_wait_for_requests_to_leave_their_rows() -> None:
    """A plan that ends requests costs no more than any other; `tidy`, or the next event, vacates their rows."""

    def costs(max_tokens: int) -> tuple[int, int]:
        cluster = Cluster(max_num_seqs=4, max_plans_in_flight=1)
        cluster.join(ModelWorker(b"w", num_blocks=64, block_size=4, max_rows=4))
        for stream in range(4):
            cluster.submit(stream, [stream, *range(3, 40)], max_tokens)
        cluster.plan()
        cluster.answer()
        now = cluster.now + 1.0
        return count_calls(lambda: cluster.core.plan(cluster.core.workers()[0], now)), count_calls(cluster.core.tidy)

    (plan, tidy), (ending_plan, ending_tidy) = costs(100), costs(2)

    assert ending_plan <= plan + 4
    assert ending_tidy > tidy + 20


def test_time_that_passes_looks_at_no_rows_of_workers_without_stalled_readers() -> None:
    """A tick costs a few calls for each worker while every reader has credit."""

    def cost(num_workers: int) -> int:
        cluster = Cluster(max_num_seqs=4)
        for number in range(num_workers):
            worker = ModelWorker(b"w%d" % number, num_blocks=64, block_size=4, max_rows=4)
            cluster.join(worker, f"w{number}")
        for stream in range(num_workers):
            cluster.submit(stream, [stream, 3, 4], 20)
        cluster.plan()
        return count_calls(lambda: cluster.core.handle(ev.TimePassed(), cluster.now))

    assert cost(22) - cost(2) <= 20 * 5


def test_time_that_passes_looks_at_no_request_while_none_can_have_waited_too_long() -> None:
    """Without workers, a tick costs the same however many requests wait, until the time is up."""

    def cost(num_waiting: int) -> int:
        cluster = Cluster()
        for stream in range(num_waiting):
            cluster.submit(stream, [stream, 3, 4], 20)
        return count_calls(lambda: cluster.core.handle(ev.TimePassed(), cluster.now))

    assert cost(50) == cost(2)


def _joined(**limits: object) -> Cluster:
    cluster = Cluster(**limits)
    cluster.join(_worker())
    return cluster


def test_a_worker_without_work_gets_a_plan_that_frees_its_rows() -> None:
    """After the last result, one more plan lists the ended rows, although it computes nothing."""
    cluster = _joined()
    cluster.submit(1, [1, 2], 3)
    cluster.run()
    assert cluster.workers[b"w/1"].rows == {}


def test_time_in_the_queue_ends_with_the_first_plan() -> None:
    """The reported queueing time of a request does not include the time for which it ran."""
    cluster = _joined()
    before = cluster.now
    reader = cluster.submit(1, [1, 2], 50)
    cluster.plan()
    planned = cluster.now
    cluster.run()
    assert reader.end is not None
    assert reader.end.queued_s <= planned - before < cluster.now - before


def test_deadlines_of_ended_requests_take_no_memory() -> None:
    """When many requests with distant deadlines have ended, their deadlines are dropped although no request arrives."""
    cluster = Cluster(**SMALL)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    for stream in range(200):
        cluster.submit(stream, [1, 2], 2, deadline=cluster.now + 1e6)
    cluster.run()
    cluster.handle(ev.TimePassed())

    assert sizes_of(cluster.core, cluster.core.epochs())["Timeouts._deadlines"] <= 64


def test_deadlines_hold_after_many_requests_have_ended() -> None:
    """The remaining requests end at their deadlines, however many requests with deadlines have ended before."""
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


def test_a_waiting_request_that_cannot_meet_its_deadline_is_not_started() -> None:
    """If a deadline becomes impossible while a request waits, the request ends instead of starting."""
    cluster = _joined(max_num_seqs=2)
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
    """The statistics count each ended request once, by reason."""
    cluster = _joined()
    for stream in range(3):
        cluster.submit(stream, [stream], 4)
    cluster.run()
    ended = {reason: count for reason, count in cluster.core.stats().ended.items() if count}
    assert ended == {ef.EndReason.LENGTH: 3}
