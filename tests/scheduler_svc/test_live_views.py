"""Live views of a recorded core: complete, bounded per front end, and without cost while nobody watches."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from records.reader import read
from records.rules.model_worker import ModelWorker
from records.values import PlanAsked
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.frontend import hub as frontend_hub
from scheduler_svc.frontend.hub import FrontendHub
from scheduler_svc.live_views import MAX_VIEWS, LiveViews
from scheduler_svc.recorder.recorder import Recorder
from scheduler_svc.recorder.step_view import StepView
from scheduler_svc.recorder.tape import RecordedScheduler
from shared.frames import LINK_MAX_MESSAGE
from shared.sockets import connect_dealer, receive_from
from tests.scheduler_svc.cluster import FRONTEND, Cluster

PATIENCE_S = 60.0
WATCHER = b"watcher/1"


class _Service(Cluster):
    """A recorded core with a front end that watches over a real socket."""

    def __init__(self, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]", **limits: object) -> None:
        super().__init__(**limits)
        config = CoreConfig(**limits)  # type: ignore[arg-type]
        self.recorder = Recorder(
            folder / "record", max_bytes=8 << 20, config=config, incarnation=1, release="test", clock=lambda: self.now
        )
        self.core = RecordedScheduler(config, 1 << 40, self.recorder.tape)
        self.handle(ev.FrontendJoined(frontend=FRONTEND))
        address = f"ipc://{folder}/f"
        self.hub = FrontendHub(context, address, incarnation=1, lease_s=1e9)
        self.dealer = connect_dealer(context, address, identity=WATCHER, max_message=LINK_MAX_MESSAGE)
        self.dealer.send(b"")
        assert self.hub.socket.poll(20_000)
        receive_from(self.hub.socket)
        self.hub.heard(WATCHER, 0.0, version=1)
        self.views = LiveViews(self.recorder, self.hub, self.core, 0, config.policy)
        self.join(ModelWorker(b"w/1", 64, 4, 8))

    def watch(self) -> None:
        """Begins a view; returns when the recorder's thread makes its parts."""
        assert not _ask(self.views, 1).HasField("error")
        self.until(lambda: self.recorder._encoder.view is not None)

    def until(self, condition: Callable[[], bool]) -> None:
        """Publishes until a condition holds."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"not after {PATIENCE_S} s"
            self.views.publish(self.now)
            self.hub.flush()
            time.sleep(0.005)

    def received(self) -> Iterator[tuple[admin.WatchStepsResponse, int]]:
        """Yield what has arrived at the front end: parts, and the numbers that it would count if it dropped them."""
        while self.dealer.poll(500):
            for view in link_pb2.CoreMessage.FromString(self.dealer.recv()).views:
                assert view.number == 1
                yield admin.WatchStepsResponse.FromString(view.response), view.steps

    def settle(self) -> None:
        """Returns when the recorder's thread has handed over all steps, and the load after them."""
        self.until(lambda: not self.recorder.tape.items)
        view = self.recorder._encoder.view
        assert view is not None
        for _ in range(2):  # When the second load is computed, the first load and all steps have been delivered.
            self.now += 10.0
            self.until(lambda: not view.is_load_due(self.now))
        self.until(lambda: not self.recorder._parts)


@contextmanager
def _service(folder: Path, **limits: object) -> Iterator[_Service]:
    with zmq.Context() as context:
        service = _Service(folder, context, **limits)
        try:
            yield service
        finally:
            service.recorder.close()
            service.dealer.close()
            service.hub.socket.close()


def _ask(views: LiveViews, number: int, peer: bytes = WATCHER) -> link_pb2.OperatorReply:
    request = link_pb2.OperatorRequest(number=number)
    request.call.Pack(admin.WatchStepsRequest())
    assert LiveViews.asked(request)
    return views.ask(peer, request)


def _work(service: _Service) -> None:
    """Requests that are preempted and held out."""
    for stream in range(1, 7):
        service.submit(stream, [stream] * (2 * stream), 12, priority=stream // 3, credit=20, tenant=f"t{stream % 2}")
        for _ in range(3):
            service.plan()
            service.answer()
            service.handle(ev.CreditGranted(frontend=FRONTEND, stream=1 + stream // 2, credit=24))
    for stream in range(1, 7):
        service.handle(ev.CreditGranted(frontend=FRONTEND, stream=stream, credit=1000))


def test_a_view_has_every_row_of_every_step(tmp_path: Path) -> None:
    """Steps contain the rows that the plans computed, with the requests' ids; the load is the core's."""
    with _service(tmp_path, max_num_seqs=3, max_num_batched_tokens=8, policy="priority") as service:
        service.submit(9, [1, 2, 3], 30)
        service.plan()
        service.answer()
        begun = len(service.plans)
        service.watch()
        _work(service)
        waiting = service.core.stats().waiting
        service.settle()
        found = [part for part, _ in service.received()]
        service.run()

    steps = {step.step: step for part in found for step in part.steps}
    names = {request.number: request for part in found for request in part.requests}
    plans = [plan for plan in service.plans[begun:] if plan.step in steps]
    assert len(plans) > 15
    assert [step.step for part in found for step in part.steps] == sorted(steps)
    for plan in plans:
        step = steps[plan.step]
        assert step.worker_id == "w"
        assert len(step.decode_rows) == len(step.decode_requests) == plan.num_decodes
        assert list(step.prefill_rows) == plan.chunk_rows.tolist()
        assert list(step.prefill_tokens) == plan.chunk_lengths.tolist()
        assert {*step.decode_requests, *step.prefill_requests} <= names.keys()
        for admission in plan.admissions:
            number = dict(zip(step.prefill_rows, step.prefill_requests, strict=True))[admission.row]
            assert names[number].request_id == admission.spec.request_id
            assert names[number].tenant == admission.spec.tenant
    assert {each.request_id for each in names.values()} == {"r9", *(f"r{stream}" for stream in range(1, 7))}
    load = [part.load for part in found if part.HasField("load")][-1]
    assert load.waiting_requests == waiting > 0
    assert sum(each.waiting_requests for each in load.waiting_by_tenant) == waiting
    assert {each.tenant for each in load.waiting_by_tenant} <= {"", "t0", "t1"}
    (worker,) = load.workers
    assert worker.total_blocks == 64
    assert not any(part.dropped_steps for part in found)


def test_rates_count_cached_prompt_tokens(tmp_path: Path) -> None:
    """Tokens of a prompt whose KV was cached count when the request is admitted, and not among the computed ones."""
    prompt = list(range(100, 117))
    with _service(tmp_path, prefix_cache="hash") as service:
        service.watch()
        for stream in (1, 2, 3):
            service.submit(stream, prompt, 2)
            service.run()
        service.settle()
        rates = [part.load.rates for part, _ in service.received() if part.HasField("load")]

    assert sum(each.cached_prompt_tokens for each in rates) == 2 * 16, "four blocks of four tokens, twice"
    assert sum(each.prompt_tokens for each in rates) == len(prompt) + 2 * 1


def test_a_front_end_that_does_not_keep_up_learns_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two frames from a front end, only a limited number of bytes is sent; the missed steps are counted."""
    monkeypatch.setattr(frontend_hub, "MAX_VIEW_BYTES", 1000)
    with _service(tmp_path, max_num_seqs=3) as service:
        service.watch()
        _work(service)
        service.settle()
        service.submit(20, [1, 2], 60)
        service.run()
        service.settle()
        early = list(service.received())
        service.hub.heard(WATCHER, 1.0)
        service.submit(21, [1, 2], 3)
        service.run()
        service.settle()
        late = list(service.received())

    seen = sum(len(part.steps) for part, _ in early + late)
    missed = sum(part.dropped_steps for part, _ in early + late)
    assert sum(len(part.SerializeToString()) for part, _ in early) <= 1000
    assert missed > 0
    assert seen + missed == len(service.plans) == sum(steps for _, steps in early + late)


def test_nothing_is_made_while_nobody_watches(tmp_path: Path) -> None:
    """Without a view, and after its end or its front end's, the recorder makes no parts and nothing is sent."""
    with _service(tmp_path) as service:
        ends: list[Callable[[], None]] = [
            lambda: None,
            lambda: service.views.end(WATCHER, [1]),
            lambda: service.views.forget(WATCHER),
        ]
        for end in ends:
            end()
            service.until(lambda: service.recorder._encoder.view is None)
            list(service.received())
            num_plans = len(service.plans)
            service.submit(30 + num_plans, [1, 2], 5)
            service.run()
            service.until(lambda: not service.recorder.tape.items)
            assert len(service.plans) > num_plans
            assert list(service.recorder.take_views()) == []
            assert list(service.received()) == []
            service.watch()


def test_views_are_few_and_need_a_record(tmp_path: Path) -> None:
    """One view more than allowed is refused; a lost front end frees its views; without a record there are no views."""
    with _service(tmp_path) as service:
        for number in range(MAX_VIEWS):
            assert not _ask(service.views, number + 1, WATCHER if number % 2 else b"other/1").HasField("error")
        assert _ask(service.views, 99).error.reason == "OVERLOADED"
        service.views.forget(b"other/1")
        for number in range(MAX_VIEWS // 2):
            assert not _ask(service.views, 100 + number).HasField("error")
        assert _ask(service.views, 200).error.reason == "OVERLOADED"
        without = LiveViews(None, service.hub, service.core, 0, "fcfs")
        assert _ask(without, 1).error.reason == "UNSUPPORTED_METHOD"
        without.publish(0.0)


def test_rows_that_take_no_part_are_shown(tmp_path: Path) -> None:
    """Each occupied row is in exactly one group of columns: decode, prefill or waiting."""
    with _service(tmp_path, max_num_seqs=3, max_num_batched_tokens=8, policy="priority") as service:
        service.watch()
        _work(service)
        service.settle()
        service.run()
        service.settle()
        found = [part for part, _ in service.received()]

    occupied: set[int] = set()
    held: set[int] = set()
    steps = {step.step: step for part in found for step in part.steps}
    for plan in service.plans:
        occupied = (occupied - set(plan.leaves.tolist())) | {each.row for each in plan.admissions}
        held = ((held | set(plan.holds.tolist())) - set(plan.releases.tolist())) & occupied
        held -= {each.row for each in plan.admissions}
        step = steps[plan.step]
        groups = [*step.decode_rows, *step.prefill_rows, *step.waiting_rows]
        assert sorted(groups) == sorted(occupied)
        assert held <= set(step.waiting_rows)
        assert len(step.waiting_rows) == len(step.waiting_requests)
    assert any(step.waiting_rows for step in steps.values())


def test_what_went_wrong_is_shown(tmp_path: Path) -> None:
    """Preemptions, and workers that are lost or join, are incidents with the names of those concerned."""
    with _service(tmp_path, max_num_seqs=3, max_num_batched_tokens=8, policy="priority") as service:
        service.watch()
        _work(service)
        service.settle()
        service.lose(b"w/1")
        service.join(ModelWorker(b"w/2", 64, 4, 8), "successor")
        service.run()
        service.settle()
        found = [incident for part, _ in service.received() for incident in part.incidents]

    kinds = admin.Incident
    workers = [(each.kind, each.worker_id) for each in found if each.worker_id]
    # The first worker may have joined before or after the view started the recorder's thread.
    assert workers[-2:] == [(kinds.KIND_WORKER_LOST, "w"), (kinds.KIND_WORKER_JOINED, "successor")]
    victims = {each.request_id for each in found if each.kind == kinds.KIND_PREEMPTED}
    assert victims
    assert victims <= {f"r{stream}" for stream in range(1, 7)}
    times = [each.time.ToNanoseconds() for each in found]
    assert times == sorted(times)


def test_the_rates_are_those_of_the_core(tmp_path: Path) -> None:
    """Arrivals, ends, tokens and met targets are counted once, over all loads."""
    with _service(tmp_path, max_num_seqs=3, max_num_batched_tokens=8) as service:
        service.watch()
        for stream in range(1, 7):
            late = service.now - 1.0 if stream in (2, 3) else None
            service.submit(stream, [stream] * 5, 4, ttft_deadline=late if stream == 2 else None, total_deadline=late)
        service.handle(ev.RequestCancelled(frontend=FRONTEND, stream=6))
        service.run()
        service.settle()
        rates = [part.load.rates for part, _ in service.received() if part.HasField("load")]

    assert sum(each.arrived_requests for each in rates) == 6
    assert sum(each.completed_requests for each in rates) == 5
    assert sum(each.good_requests for each in rates) == 3
    assert sum(each.output_tokens for each in rates) == 5 * 4
    assert sum(each.prompt_tokens for each in rates) == sum(
        plan.chunk_lengths.sum() for plan in service.plans if len(plan.chunk_rows)
    )
    assert sum(each.ttft.count for each in rates) == 5
    assert all(0 < each.ttft.p50 <= each.ttft.p99 for each in rates if each.ttft.count)
    assert sum(each.itl.count for each in rates) > 0


def test_tables_are_for_views_that_ask(tmp_path: Path) -> None:
    """A view that requests them gets the core's queues and blocks, at most twice per second; others get none."""
    with _service(tmp_path, max_num_seqs=2, max_num_batched_tokens=64) as service:
        for stream in range(5):
            service.submit(stream, [stream, 1, 2, 3, 4], 9)
        service.plan()
        service.watch()
        service.settle()
        assert not any(part.HasField("tables") for part, _ in service.received())

        service.views.end(WATCHER, [1])
        request = link_pb2.OperatorRequest(number=1)
        request.call.Pack(admin.WatchStepsRequest(tables=True))
        assert not service.views.ask(WATCHER, request).HasField("error")
        for _ in range(20):
            service.now += 0.1
            service.views.publish(service.now)
        service.hub.flush()
        found = [part.tables for part, _ in service.received() if part.HasField("tables")]

    assert 3 <= len(found) <= 5
    (blocks,) = found[-1].block_maps
    assert (blocks.worker_id, blocks.device.total, len(blocks.owners)) == ("w", 64, 2)
    (worker,) = service.core.stats().workers
    counts = dict.fromkeys(range(3), 0)
    for length, state in zip(blocks.device.lengths, blocks.device.states, strict=True):
        counts[min(state, 3)] = counts.get(min(state, 3), 0) + length
    assert counts == {0: worker.blocks_free, 1: worker.blocks_cached, 2: 0, 3: worker.blocks_held}
    (queue,) = found[-1].queues
    assert found[-1].policy == "balanced"
    assert (queue.reason, queue.length) == ("room", 3)
    assert [each.request_id for each in queue.first] == ["r2", "r3", "r4"]
    assert len({each.number for each in queue.first} | set(blocks.owners)) == 5


def test_an_error_in_a_view_ends_the_views_and_not_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The views end with an error, it is logged once, the record is complete, and a later view works."""

    def fail(*_: object) -> None:
        raise KeyError("planted")

    with _service(tmp_path, max_num_seqs=3, max_num_batched_tokens=8) as service:
        for number in (1, 2):
            service.watch()
            with monkeypatch.context() as patched:
                patched.setattr(StepView, "answered", fail)
                service.submit(number, [1, 2, 3], 5)
                service.run()
                service.until(lambda: not service.views._views)
            service.hub.flush()
            assert service.dealer.poll(20_000)
            replies: list[link_pb2.OperatorReply] = []
            while not replies:
                assert service.dealer.poll(20_000)
                replies = list(link_pb2.CoreMessage.FromString(service.dealer.recv()).operator_replies)
            assert [(each.number, each.error.reason) for each in replies] == [(1, "NOT_READY")]
        service.watch()
        begun = len(service.plans)
        service.submit(3, [1, 2, 3], 5)
        service.run()
        service.settle()
        steps = [step.step for part, _ in service.received() for step in part.steps]
        assert steps == [plan.step for plan in service.plans[begun:]]
        assert not service.recorder.tape.is_off
        num_plans = len(service.plans)
    assert "".join(capsys.readouterr()).count("live views ended by an error") == 1
    entries = [entry.what for segment in read(tmp_path / "record") for entry in segment]
    assert sum(isinstance(each, PlanAsked) and each.plan is not None for each in entries) == num_plans
