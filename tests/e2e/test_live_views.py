"""Live views of a whole service show every step with its rows, and nothing of a dead front end remains."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from measure.testbed.service import PATIENCE_S, Served, serve
from quire.admin.v1 import admin_pb2 as admin
from quire.admin.v1 import admin_pb2_grpc
from quire.client import Client
from records.reader import read
from scheduler_svc.core.interface import events as ev
from scheduler_svc.live_views import MAX_VIEWS


@contextlib.contextmanager
def _operator(served: Served) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    with grpc.insecure_channel(served.grpc) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def _begin(operator: admin_pb2_grpc.AdminServiceStub) -> "Iterator[admin.WatchStepsResponse]":
    """A view that has begun."""
    view = operator.WatchSteps(admin.WatchStepsRequest(), timeout=PATIENCE_S)
    assert next(view) == admin.WatchStepsResponse()
    return view


def test_a_view_shows_the_steps_of_a_service(demo: Served) -> None:
    """Each step's rows equal those in the worker's result; requests have their ids, and steps their times."""
    demo.wait_until_empty()
    began = time.time()
    found: list[admin.WatchStepsResponse] = []
    with _operator(demo) as operator:
        view = _begin(operator)
        with ThreadPoolExecutor(3) as pool, Client(demo.grpc) as client:
            prompts = [f"Once upon a time there were {count} foxes" for count in range(3)]
            answers = list(pool.map(lambda prompt: list(client.generate(prompt, max_tokens=20)), prompts))
        # The load is sampled when a message is sent, and may be newer than the steps. Read on until each token was
        # seen. A request's first token comes from its last prefill step.
        decoded = sum(len(delta.token_ids) for answer in answers for delta in answer) - len(prompts)
        for part in view:
            found.append(part)
            named = {request.request_id for each in found for request in each.requests}
            seen = sum(len(step.decode_rows) for each in found for step in each.steps)
            if part.HasField("load") and seen >= decoded and len(named) == len(prompts):
                break

    assert len(answers) == len(prompts)
    (workers,) = [part.load.workers for part in found[-1:]]
    assert workers[0].total_blocks > 0
    steps = {(step.worker_id, step.step): step for part in found for step in part.steps}
    folder = demo.log.parent / "quire" / "record" / "any"
    sampled = {}
    for entry in (entry for segment in read(folder) for entry in segment):
        if isinstance(entry.what, ev.StepDone):
            sampled[entry.what.step] = set(entry.what.rows.tolist())
    assert len(steps) > 10
    for (_, number), step in steps.items():
        assert set(step.decode_rows) <= sampled[number] <= {*step.decode_rows, *step.prefill_rows}
        assert began < step.start.seconds + step.start.nanos / 1e9 < time.time()
        assert step.duration.ToNanoseconds() > 0 or not (step.decode_rows or step.prefill_rows)
    assert not any(part.dropped_steps for part in found)


@pytest.mark.release
def test_a_dead_front_end_frees_its_views(tmp_path: Path) -> None:
    """When all views are taken, another is refused; after their front end was killed, views can be opened again."""
    with serve("demo", environ={"XDG_STATE_HOME": str(tmp_path)}) as served:
        with _operator(served) as operator:
            views = [_begin(operator) for _ in range(MAX_VIEWS)]
            with pytest.raises(grpc.RpcError) as refusal:
                _begin(operator)
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            (frontend,) = served.children("frontend")
            frontend.kill()
            for view in views:
                with contextlib.suppress(grpc.RpcError):
                    list(view)
        again: list[Iterator[admin.WatchStepsResponse]] = []
        end = time.monotonic() + PATIENCE_S
        with _operator(served) as operator:
            while len(again) < MAX_VIEWS:
                assert time.monotonic() < end, f"only {len(again)} views after {PATIENCE_S} s"
                try:
                    again.append(_begin(operator))
                # The front end is restarting, or the loss of its predecessor is not yet detected.
                except grpc.RpcError:
                    time.sleep(0.2)
