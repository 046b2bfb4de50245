"""The screen of `quire top` for the messages of a live view, and `quire top` during a takeover."""

from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from quire.admin.v1 import admin_pb2 as admin
from quire.admin.v1 import admin_pb2_grpc
from quire_server.cli._top_view import Top, bar, batch_line, curve
from quire_server.cli.main import main
from tests.quire.scripted_server import fail, reason


def _load(
    seconds: float, *, output: int = 0, cached: int = 0, p50: float = 0.0, p99: float = 0.0, count: int = 0
) -> admin.SchedulerLoad:
    load = admin.SchedulerLoad(running_requests=3, waiting_requests=2)
    load.workers.add(
        worker_id="w0", draining=True, running_requests=3, rows=8, free_blocks=25, cached_blocks=25, total_blocks=100
    )
    load.waiting_by_reason.update({"room": 2, "grammar": 0})
    load.waiting_by_tenant.add(tenant="search", waiting_requests=2)
    rates = load.rates
    rates.seconds, rates.output_tokens, rates.completed_requests, rates.good_requests = seconds, output, 4, 2
    rates.prompt_tokens, rates.cached_prompt_tokens = 60, cached
    rates.ttft.count, rates.ttft.p50, rates.ttft.p99 = count, p50, p99
    return load


def _tables() -> admin.SchedulerTables:
    tables = admin.SchedulerTables(policy="fair")
    queue = tables.queues.add(reason="room", length=2)
    for name in ("first", "second"):
        queue.first.add(request_id=name, tokens=12, waited_seconds=0.5, waits_for="a free row")
    return tables


def _step(decode: list[int], prefill: Sequence[int] = (), waiting: Sequence[int] = ()) -> admin.WatchedStep:
    step = admin.WatchedStep(worker_id="w0", decode_rows=decode, prefill_rows=prefill, waiting_rows=waiting)
    step.prefill_tokens.extend([10] * len(prefill))
    step.duration.FromMilliseconds(500)
    return step


def test_the_screen_shows_what_happened_since_the_one_before() -> None:
    """Rates cover the interval; the batch is the newest step; a new screen begins a new interval."""
    top = Top("host:1")
    top.take(admin.WatchStepsResponse(load=_load(0.0, output=9), tables=_tables()))
    assert not top.is_complete, "the first load covers no time"
    top.take(admin.WatchStepsResponse(steps=[_step([0, 1]), _step([0], [2], [3])], dropped_steps=7))
    top.take(admin.WatchStepsResponse(load=_load(2.0, output=191, cached=180, p50=0.5, p99=0.9, count=3)))
    assert top.is_complete
    text = "\n".join(top.lines())

    for part in (
        "quire host:1   1 workers   7 steps were left out",
        "       3 running          2 waiting",
        "     4.0 /s             2.0 /s within their targets",
        "     100 output          60 prompt",
        "cached           90 prompt tokens/s, 60% of all prompt tokens",
        "500 / 900 ms  (p50 / p99)",
        "w0               draining [############------      ]   50%    3/8       1.0         6   50%",
        "  #.P-",
        "waiting (fair): 2 room",
        "by tenant: 2 search",
        "  1. first ",
        "  2. second ",
    ):
        assert part in text
    assert not top.is_complete
    top.take(admin.WatchStepsResponse(load=_load(1.0, output=5)))
    after = "\n".join(top.lines())
    assert "       5 output" in after
    assert "TTFT       - " in after
    assert "cached            0 prompt tokens/s, 0% of all prompt tokens" in after


def test_the_screen_shows_the_leader_and_its_standbys_if_there_are_any() -> None:
    """A service without standbys has no such line."""
    load, top = _load(1.0), Top("host:1")
    top.take(admin.WatchStepsResponse(load=load, tables=_tables()))
    assert "leader" not in "\n".join(top.lines())

    load.leadership.leader, load.leadership.leader_number, load.leadership.seconds = "a-7", 12, 3.4
    load.leadership.other_standbys, load.leadership.lag_bytes = 1, 900
    top.take(admin.WatchStepsResponse(load=load))

    line = "leader     a-7 under number 12 for 3 s   standbys: none ready, 1 copying, 900 bytes behind"
    assert line in top.lines()
    load.leadership.leader_number = load.leadership.other_standbys = load.leadership.lag_bytes = 0
    load.leadership.ready_standbys = 1
    top.take(admin.WatchStepsResponse(load=load))
    assert "leader     a-7 for 3 s   standbys: 1 ready" in top.lines()


def test_incidents_are_listed() -> None:
    """The newest five incidents, each in one line."""
    top = Top("host:1")
    for number in range(9):
        part = admin.WatchStepsResponse()
        part.incidents.add(kind=admin.Incident.KIND_WORKER_LOST, worker_id=f"w{number}", detail="gone")
        top.take(part)
    found = [line for line in top.lines() if "worker lost" in line]
    assert [line.rpartition("  ")[2] for line in found] == [f"worker lost: w{number}, gone" for number in range(4, 9)]


def test_a_batch_is_one_character_per_row() -> None:
    """Rows without a request are dots; very many rows are truncated."""
    assert batch_line(_step([0, 4], [2], [1])) == "#-P.#"
    assert len(batch_line(_step(list(range(500))))) == 128
    assert batch_line(_step([])) == ""


def test_a_curve_is_as_high_as_its_largest_value() -> None:
    """Nothing is a blank; all equal values are full blocks."""
    assert curve([0.0, 4.0, 8.0]) == " ▄█"
    assert curve([]) == ""
    assert curve([0.0, 0.0]) == "  "


@pytest.mark.parametrize(("held", "cached"), [(0.0, 0.0), (1.0, 0.0), (0.5, 0.5), (0.97, 0.03), (0.26, 0.74)])
def test_a_bar_is_always_as_long_as_a_bar(held: float, cached: float) -> None:
    """Rounding never makes a bar longer or shorter."""
    assert len(bar(held, cached)) == len(bar(0.0, 0.0))


def test_drafts_are_those_since_the_screen_before() -> None:
    """A worker that verified drafts has a line with drafts per step and their acceptance in the interval."""
    top = Top("host:1")
    texts = []
    for drafts, accepted in ((100, 50), (140, 80), (140, 80), (8, 8)):
        load = _load(2.0)
        load.workers[0].draft_tokens, load.workers[0].accepted_draft_tokens = drafts, accepted
        top.take(admin.WatchStepsResponse(steps=[_step([0]), _step([0])], load=load, tables=_tables()))
        texts.append([line for line in top.lines() if "drafts:" in line])

    assert texts[1:] == [["  drafts: 20.0 per step, 75% accepted"], [], ["  drafts: 4.0 per step, 100% accepted"]]


def test_kinds_of_cache_have_their_memory() -> None:
    """A worker with windows or recurrent state has lines with blocks, states and checkpoints; others have none."""
    load, top = _load(1.0), Top("host:1")
    (worker,) = load.workers
    worker.cache_kinds.append("full")
    top.take(admin.WatchStepsResponse(load=load, tables=_tables()))
    assert "cache:" not in "\n".join(top.lines())

    worker.cache_kinds.extend(["window", "state"])
    worker.block_bytes, worker.window_blocks, worker.state_bytes = 1 << 20, 12, 1536
    worker.checkpoints.total, worker.checkpoints.used, worker.checkpoints.saved = 8, 5, 9
    worker.checkpoints.restored, worker.checkpoints.evicted = 4, 2
    top.take(admin.WatchStepsResponse(load=load))
    lines = top.lines()

    assert "  cache: full 38 blocks (38.0 MiB), window 12 blocks (12.0 MiB), state 3 of 8 rows (4.5 KiB)" in lines
    assert "  checkpoints: 5 of 8 used, 9 saved, 4 restored, 2 evicted" in lines


class _Service(admin_pb2_grpc.AdminServiceServicer):
    """An operator API whose first live views fail as during a takeover."""

    def __init__(self, failures: Sequence[str]) -> None:
        self.target = ""
        self.failures = list(failures)
        """Reasons of the failures that are still to come; an empty one fails a view that has begun."""

    def WatchSteps(
        self, request: admin.WatchStepsRequest, context: grpc.ServicerContext
    ) -> Iterator[admin.WatchStepsResponse]:
        """Fail, or send one complete update."""
        if self.failures:
            failure = self.failures.pop(0)
            if not failure:
                yield admin.WatchStepsResponse()
                yield admin.WatchStepsResponse(load=_load(0.0, output=9))
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(1)
            fail(context, grpc.StatusCode.UNAVAILABLE, "watch: lost", reason(failure or "NOT_READY"), retry)
        yield admin.WatchStepsResponse()
        yield admin.WatchStepsResponse(load=_load(0.0), tables=_tables())
        yield admin.WatchStepsResponse(load=_load(1.0, output=5))


@contextmanager
def _served(*failures: str) -> Iterator[_Service]:
    service = _Service(failures)  # type: ignore[abstract]  # the rest is not called
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
    service.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield service
    finally:
        server.stop(None).wait()


def test_one_reading_waits_for_the_next_leader(capsys: pytest.CaptureFixture[str]) -> None:
    """During a takeover, views are refused or end. The numbers are those of the new leader only."""
    with _served("NOT_READY", "", "NOT_READY") as service:
        code = main(["top", "--once", "--target", service.target])

    out, err = capsys.readouterr()
    assert (code, err, service.failures) == (0, "", [])
    assert "       5 output" in out


def test_one_reading_does_not_wait_for_ever(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a leader, the command fails with the error of the service."""
    monkeypatch.setattr("quire_server.cli.top._PATIENCE_S", 0.0)
    with _served("NOT_READY", "NOT_READY") as service:
        code = main(["top", "--once", "--target", service.target])

    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    assert "watch: lost" in err
    assert service.failures == ["NOT_READY"]


def test_other_errors_of_a_view_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A full service stays full."""
    with _served("OVERLOADED") as service:
        code = main(["top", "--once", "--target", service.target])

    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    assert "watch: lost" in err
