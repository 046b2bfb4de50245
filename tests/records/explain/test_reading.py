"""Explanations of requests of a simulated cluster, from a record on disk."""

import dataclasses
import json
from pathlib import Path

import pytest

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.admin.v1 import admin_pb2 as admin
from quire_server.cli.main import main
from records.explain.accounting import CauseKind, account
from records.explain.advice import advice
from records.explain.answers import answer
from records.explain.facts import Life, StreamKey
from records.explain.reading import Findings, study
from records.reader import read
from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig, TenantLimits
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.recorder.tape import Reported, Tape
from shared.errors import InvalidRequestError, RequestNotFoundError
from shared.prefix_keys import following_keys, root_key
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.recording import Recording

WALL = 1.7e9
"""What the worker's clock shows at core time 0, s."""
STEP_S = 0.02


class _Recorded(Cluster):
    """A cluster with a record, and a worker whose steps take `STEP_S` by its own clock."""

    def __init__(self, folder: Path, **limits: object) -> None:
        super().__init__(**limits)
        self._recording = Recording(folder)
        self._folder = folder
        self._config = CoreConfig(**limits)  # type: ignore[arg-type]
        self._frontend = FRONTEND
        self.core = self._recording.make_core(self._config, 1 << 40)
        self.handle(ev.FrontendJoined(frontend=FRONTEND))
        self.made: list[tuple[Plan, float]] = []
        self.shared_id = ""
        """Id of all following requests; empty if each has its own."""

    def handle(self, event: ev.Event) -> list[ef.Effect]:
        """Computes the block keys of requests, as a front end does."""
        if isinstance(event, ev.RequestArrived):
            keys = following_keys(root_key("f", b""), event.token_ids.tobytes(), 4)
            event = dataclasses.replace(event, block_keys=keys, block_size=4 if keys else 0, frontend=self._frontend)
            if self.shared_id:
                event = dataclasses.replace(event, spec=event.spec._replace(request_id=self.shared_id))
        return super().handle(event)

    @property
    def tape(self) -> Tape:
        """The tape of the core."""
        tape = self._recording._tape
        assert tape is not None
        return tape

    def restart(self) -> None:
        """The scheduler dies and the next one starts; the front end returns under another name."""
        self.core = self._recording.make_core(self._config, 2 << 40, self.now)
        self._frontend = b"front/2"
        self.handle(ev.FrontendJoined(frontend=self._frontend))

    def turn(self) -> None:
        """Plan, let the step take its time, and return its result with timings."""
        self.plan()
        self.now += STEP_S
        started = int((WALL + self.now - STEP_S) * 1e9)
        self.tape.timings = plan_pb2.StepTimings(
            received_unix_ns=started, started_unix_ns=started, forward_ns=int(STEP_S * 0.9e9), sample_ns=1_000_000
        )
        self.answer()

    def begin_segment(self) -> None:
        """The record goes on in another file."""
        self._recording._cut_every = 1
        self._recording._cut(self.core, self.now)
        self._recording._cut_every = 0

    def pass_time(self, seconds: float) -> None:
        """Nothing happens for a while; a live scheduler makes two entries per second."""
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.handle(ev.TimePassed())

    def finish(self) -> None:
        """Turns until nothing is left to do."""
        for _ in range(500):
            if self.core.is_idle:
                return
            self.turn()
        raise AssertionError("the cluster does not come to rest")

    def report(self, stream: int, **durations: int) -> None:
        """The front end reports a call."""
        report = link_pb2.RequestReport(stream=stream, **durations)
        self.tape.append(Reported(self._frontend, report, self.now))

    def study(self, *names: str) -> Findings:
        """Reads what is wanted of the record."""
        self._recording.finish()
        return study(read(self._folder), wanted=lambda _key, name: name in names)


def _cluster(folder: Path, *, num_host_blocks: int = 0, max_rows: int = 8, **limits: object) -> _Recorded:
    cluster = _Recorded(folder, **limits)
    cluster.join(ModelWorker(b"w/1", 64, 4, max_rows, num_host_blocks=num_host_blocks))
    return cluster


def _first(found: Findings) -> CauseKind:
    (life,) = found.lives
    return _first_of(life)


def _first_of(life: Life) -> CauseKind:
    return account(life).causes[0].kind


def test_who_decodes_in_each_step_is_derived_from_the_plans(tmp_path: Path) -> None:
    """For every step, the derived requests are as many as the plan counted, preemptions and holds included."""
    cluster = _cluster(tmp_path, max_num_seqs=3, max_num_batched_tokens=8, policy="priority")
    for stream in range(1, 7):
        cluster.submit(stream, [stream] * (2 * stream), 12, priority=stream // 3, credit=20)
        for _ in range(3):
            cluster.turn()
            cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=1 + stream // 2, credit=24))
    for stream in range(1, 7):
        cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=stream, credit=1000))
    cluster.finish()
    plans = {plan.step: plan for plan in cluster.plans}
    found = cluster.study(*(f"r{stream}" for stream in range(1, 7)))

    steps = {step.number: step for life in found.lives for step in life.steps}
    assert len(steps) > 20
    for number, step in steps.items():
        assert len(step.decodes) == plans[number].num_decodes, number
        assert step.num_tokens == plans[number].num_tokens, number


def test_a_neighbours_long_prompt_is_named_with_its_id(tmp_path: Path) -> None:
    """A prompt that is computed beside a decoding request is the cause of its slow steps."""
    cluster = _cluster(tmp_path, max_num_seqs=4, max_num_batched_tokens=6)
    cluster.submit(1, [1, 2], 12)
    cluster.turn()
    cluster.submit(2, list(range(1, 60)), 2)
    cluster.finish()
    found = cluster.study("r1")

    assert _first(found) is CauseKind.OTHER_PROMPTS
    text = answer(admin.ExplainRequest(request_id="r1"), tmp_path).text
    assert "r2" in text
    assert "long-prefill-token-threshold" in text


def test_waits_preemptions_and_lost_workers_are_first(tmp_path: Path) -> None:
    """Tenant limits, priorities, swaps, full rows and a dead worker are named from the record alone."""
    (tmp_path / "tenant").mkdir()
    cluster = _cluster(tmp_path / "tenant", tenant_limits={"a": TenantLimits(max_running=1)})
    cluster.submit(1, [1, 2], 40, tenant="a")
    cluster.turn()
    cluster.submit(2, [1, 2], 4, tenant="a")
    cluster.finish()
    assert _first(cluster.study("r2")) is CauseKind.TENANT

    for name, num_host_blocks, kind in (("preempted", 0, CauseKind.PREEMPTED), ("swapped", 40, CauseKind.SWAPPED)):
        (tmp_path / name).mkdir()
        cluster = _cluster(tmp_path / name, num_host_blocks=num_host_blocks, max_num_seqs=1, policy="priority")
        cluster.submit(1, [1, 2, 3], 12)
        for _ in range(3):
            cluster.turn()
        cluster.submit(2, [4, 5], 40, priority=9)
        cluster.finish()
        found = cluster.study("r1")
        assert _first(found) is kind
        assert StreamKey(FRONTEND, 2) in account(found.lives[0]).causes[0].by

    (tmp_path / "rows").mkdir()
    cluster = _cluster(tmp_path / "rows", max_num_seqs=1)
    cluster.submit(1, [1, 2], 40)
    cluster.turn()
    cluster.submit(2, [1, 2], 4)
    cluster.finish()
    assert _first(cluster.study("r2")) is CauseKind.ROWS

    (tmp_path / "lost").mkdir()
    cluster = _cluster(tmp_path / "lost")
    cluster.submit(1, [1, 2, 3], 12)
    for _ in range(4):
        cluster.turn()
    cluster.pass_time(1.0)
    cluster.lose(b"w/1")
    cluster.pass_time(1.0)
    cluster.join(ModelWorker(b"w/2", 64, 4, 8))
    cluster.finish()
    assert _first(cluster.study("r1")) is CauseKind.WORKER_LOST


def test_a_prefix_that_was_known_before_is_told_from_a_new_prompt(tmp_path: Path) -> None:
    """An evicted prefix is named, with the request that computed it; a cached one is not."""
    cluster = _cluster(tmp_path, max_num_seqs=4, max_num_batched_tokens=8)
    cluster.submit(1, list(range(1, 49)), 2)
    cluster.finish()
    cluster.lose(b"w/1")
    cluster.join(ModelWorker(b"w/2", 64, 4, 8))
    cluster.submit(2, list(range(1, 49)), 2)
    cluster.finish()
    cluster.submit(3, list(range(1, 49)), 2)
    cluster.finish()
    new, again, cached = cluster.study("r1", "r2", "r3").lives

    assert account(new).causes[0].kind is CauseKind.OWN_PREFILL
    cold = account(again).causes[0]
    assert cold.kind is CauseKind.COLD_PREFIX
    assert set(cold.by) == {StreamKey(FRONTEND, 1)}
    assert cached.num_cached_tokens == 44
    assert CauseKind.COLD_PREFIX not in [cause.kind for cause in account(cached).causes]


def test_the_front_ends_report_completes_the_time(tmp_path: Path) -> None:
    """With a report, the total is the call's whole time; the client's part is a separate cause."""
    cluster = _cluster(tmp_path)
    cluster.submit(1, [1, 2, 3], 4)
    cluster.finish()
    cluster.report(
        1, submitted_us=5_000, tokenise_us=4_000, ended_us=400_000, finished_us=3_000_000, client_us=2_500_000
    )
    (life,) = cluster.study("r1").lives
    found = account(life)

    assert found.total_s == pytest.approx(3.005)
    assert sum(cause.seconds for cause in found.causes) == pytest.approx(3.005)
    assert found.causes[0].kind is CauseKind.CLIENT


def test_a_request_has_one_life_across_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    """A request that the next scheduler takes over is explained as a whole; the restart is the first cause."""
    cluster = _cluster(tmp_path)
    first = cluster.submit(1, [1, 2, 3], 12)
    began = cluster.now
    for _ in range(4):
        cluster.turn()
    cluster.restart()
    cluster.pass_time(3.0)
    cluster.submit(1, [1, 2, 3], 12, delivered=tuple(first.tokens), accepted=True)
    again = cluster.now
    cluster.join(ModelWorker(b"w/2", 64, 4, 8))
    cluster.finish()
    whole_s = cluster.now - began
    submitted_us, left_us = round((again - began) * 1e6), round((cluster.now - again) * 1e6)
    cluster.report(1, submitted_us=submitted_us + 2_000, ended_us=left_us + 1_000, finished_us=left_us + 5_000)
    (life,) = cluster.study("r1").lives
    found = account(life)

    assert found.causes[0].kind is CauseKind.SCHEDULER_LOST
    assert found.causes[0].seconds > 3.0
    assert CauseKind.OWN_DECODE in [cause.kind for cause in found.causes]
    assert life.until is None
    assert found.total_s == pytest.approx(whole_s + 0.007, abs=1e-3)


def test_a_wait_goes_on_after_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    """Of a request that only waited, the restart is charged until the next scheduler has it, and the wait follows."""
    cluster = _cluster(tmp_path, max_num_seqs=1)
    cluster.submit(1, [1, 2, 3], 100)
    cluster.submit(2, [1, 2, 3], 4)
    cluster.turn()
    cluster.restart()
    cluster.pass_time(1.0)
    cluster.join(ModelWorker(b"w/2", 64, 4, 8))
    cluster.submit(1, [1, 2, 3], 100)
    cluster.submit(2, [1, 2, 3], 4)
    arrived_s = cluster.now
    cluster.submit(3, [1, 2, 3], 4)
    cluster.finish()
    # The third request was in the front end for two seconds, half of them after the first scheduler had ended.
    left_us = round((cluster.now - arrived_s) * 1e6)
    cluster.report(3, submitted_us=2_000_000, tokenise_us=300_000, ended_us=left_us, finished_us=left_us)
    waiting, new = cluster.study("r2", "r3").lives
    seconds = {cause.kind: cause.seconds for cause in account(waiting).causes}

    assert _first_of(waiting) is CauseKind.ROWS
    assert seconds[CauseKind.SCHEDULER_LOST] == pytest.approx(1.0, abs=0.1)
    seconds = {cause.kind: cause.seconds for cause in account(new).causes}
    assert seconds[CauseKind.SCHEDULER_LOST] == pytest.approx(1.0, abs=0.1)
    assert seconds[CauseKind.FRONT_END] == pytest.approx(0.7, abs=0.1)


def test_a_life_goes_on_behind_a_gap_of_the_record_which_is_named(tmp_path: Path) -> None:
    """The time with missing entries is a separate cause, for a decoding request and for a waiting one."""
    cluster = _cluster(tmp_path, max_rows=1)
    cluster.submit(1, [1] * 8, 90)
    cluster.submit(2, [2] * 8, 4)
    cluster.submit(3, [3] * 8, 4)
    for part in range(3):
        if part:
            cluster.begin_segment()
        for _ in range(20 * (2 if part == 1 else 1)):
            cluster.turn()
    cluster.finish()
    cluster.study()
    _, missing, _ = read(tmp_path)
    missing.path.unlink()

    found = cluster.study("r1", "r2")

    ((begin, end),) = found.gaps
    assert end - begin > 40 * STEP_S
    running, waiting = map(account, found.lives)
    for each in (running, waiting):
        causes = {cause.kind: cause.seconds for cause in each.causes}
        assert causes[CauseKind.UNRECORDED] == pytest.approx(end - begin, rel=0.1)
        assert sum(causes.values()) == pytest.approx(each.total_s)
        assert each.life.until is None
    assert CauseKind.OWN_DECODE in {cause.kind for cause in running.causes}
    text = answer(admin.ExplainRequest(request_id="r1"), tmp_path).text
    assert "The record lacks " in text
    with pytest.raises(RequestNotFoundError, match=r"which goes from .* to .* UTC and lacks .* to "):
        answer(admin.ExplainRequest(request_id="other"), tmp_path)


def test_a_wait_for_drained_workers_is_told_from_one_for_none(tmp_path: Path) -> None:
    """The advice is to end the drain, and not to start a worker."""
    cluster = _cluster(tmp_path)
    cluster.handle(ev.DrainRequested(worker_id="w", move=False))
    cluster.submit(1, [1] * 8, 4)
    cluster.pass_time(5)
    cluster.handle(ev.ResumeRequested(worker_id="w"))
    cluster.finish()

    found = cluster.study("r1")

    assert _first(found) is CauseKind.NO_WORKER
    (life,) = found.lives
    assert advice(account(life)).startswith(
        "all workers were drained: end the drain of one (`quire drain WORKER --resume`"
    )


def test_the_slowest_requests_have_live_ones_among_them(tmp_path: Path) -> None:
    """A request that hangs is listed with its time so far."""
    cluster = _cluster(tmp_path, max_rows=1)
    cluster.submit(1, [1] * 8, 4)
    cluster.finish()
    cluster.submit(2, [2] * 8, 90)
    for _ in range(40):
        cluster.turn()
    cluster.study()

    listed = answer(admin.ExplainRequest(slowest=5), tmp_path).values["slowest"]

    assert [(each["request_id"], each["end"], each["live"]) for each in listed] == [
        ("r2", "live", True), ("r1", "length", False),
    ]  # fmt: skip


def test_choices_are_numbered_and_the_slowest_one_stands_for_its_call(tmp_path: Path) -> None:
    """A later request with the same id is no choice of the first one."""
    cluster = _cluster(tmp_path, max_num_seqs=4)
    cluster.shared_id = "call"
    for stream, max_tokens in ((1, 3), (2, 9), (3, 6)):
        cluster.submit(stream, [1, 2, 3], max_tokens)
    cluster.finish()
    cluster.now += 1
    cluster.submit(4, [1, 2, 3], 2)
    cluster.finish()
    cluster.study()

    explained = answer(admin.ExplainRequest(request_id="call"), tmp_path)
    listed = answer(admin.ExplainRequest(slowest=3), tmp_path).values["slowest"]

    requests = explained.values["requests"]
    assert [(each["choice"], each["completion_tokens"]) for each in requests] == [(0, 3), (1, 9), (2, 6), (None, 2)]
    heads = [line.split(": ")[0] for line in explained.text.splitlines() if line.startswith("call")]
    assert heads == ["call, choice 0", "call, choice 1", "call, choice 2", "call"]
    assert [(each["request_id"], each["completion_tokens"]) for each in listed] == [("call", 9)]


def test_the_slowest_requests_and_a_step_are_shown(tmp_path: Path) -> None:
    """The list is sorted by time; a step lists its requests; unknown names have specific errors."""
    cluster = _cluster(tmp_path, max_num_seqs=2)
    for stream in range(1, 6):
        cluster.submit(stream, [1, 2, 3], 3 * stream)
    cluster.finish()
    cluster.study()

    listed = answer(admin.ExplainRequest(slowest=3), tmp_path)
    values = json.loads(listed.message().json)["slowest"]
    times = [each["total_s"] for each in values]
    assert len(values) == 3
    assert times == sorted(times, reverse=True)
    assert values[0]["request_id"] in listed.text

    step = answer(admin.ExplainRequest(step="w:2"), tmp_path)
    assert step.text.startswith("step 2 of w: ")
    assert "r1" in step.text
    for question in (admin.ExplainRequest(request_id="nobody"), admin.ExplainRequest(step="w:99999")):
        with pytest.raises(RequestNotFoundError):
            answer(question, tmp_path)
    for question in (admin.ExplainRequest(), admin.ExplainRequest(step="w")):
        with pytest.raises(InvalidRequestError):
            answer(question, tmp_path)


def test_the_command_explains_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`quire explain` reads a record's folder without a service: as text, as JSON, and errors in one line."""
    cluster = _cluster(tmp_path)
    cluster.submit(1, [1, 2, 3], 5)
    cluster.finish()
    cluster.study()
    where = ["--record-dir", str(tmp_path)]

    assert main(["explain", "r1", *where]) == 0
    assert capsys.readouterr().out.startswith("r1: ")
    assert main(["explain", "--slowest", "3", "--since", "2h", "--json", *where]) == 0
    assert [each["request_id"] for each in json.loads(capsys.readouterr().out)["slowest"]] == ["r1"]
    assert main(["explain", "nobody", *where]) == 1
    assert capsys.readouterr().err.startswith("quire explain: request_id: no request with this id is in the record")


_STATE = {"state_bytes": 64, "num_checkpoints": 8}
_WINDOWS = {"num_kv_groups": 3, "window": 9, "window_chunk": 8}


@pytest.mark.parametrize(
    ("kind", "missing"),
    [(_STATE, "a checkpoint of the state after them"), (_WINDOWS, "the last window of them")],
    ids=["state", "windows"],
)
def test_what_limited_the_reuse_of_a_prefix_is_named(tmp_path: Path, kind: dict[str, int], missing: str) -> None:
    """The first request that diverges from a cached prompt cannot begin there; later ones can, and nothing is said."""
    cluster = _Recorded(tmp_path, prefix_cache="hash")
    cluster.join(ModelWorker(b"w/1", 200, 4, 4, max_tokens_per_step=32, **kind))  # type: ignore[arg-type]
    for stream in (1, 2, 3):
        cluster.submit(stream, [*range(20), *[50 + stream] * 12], max_tokens=4)
        cluster.finish()
    lives = cluster.study("r2", "r3").lives
    texts = [answer(admin.ExplainRequest(request_id=name), tmp_path).message() for name in ("r2", "r3")]

    assert [(each.num_cached_tokens, each.num_unusable_tokens) for each in lives] == [(0, 20), (20, 0)]
    causes = {each.kind: each.seconds for each in account(lives[0]).causes}
    assert causes[CauseKind.UNUSABLE_PREFIX] > 0
    assert CauseKind.COLD_PREFIX not in causes
    limit = f"20 prompt tokens were cached, but none could be used, because {missing} was missing."
    assert limit in texts[0].text
    assert json.loads(texts[0].json)["requests"][0]["unusable_prompt_tokens"] == 20
    assert "could be used" not in texts[1].text
    assert CauseKind.UNUSABLE_PREFIX not in [each.kind for each in account(lives[1]).causes]


@pytest.mark.parametrize("kind", [_STATE, _WINDOWS], ids=["state", "windows"])
def test_a_wait_for_a_boundary_is_named(tmp_path: Path, kind: dict[str, int]) -> None:
    """Of two equal prompts, the second waits for the end of the first one, and begins there."""
    cluster = _Recorded(tmp_path, prefix_cache="hash", long_prefill_token_threshold=8)
    cluster.join(ModelWorker(b"w/1", 200, 4, 4, max_tokens_per_step=32, **kind))  # type: ignore[arg-type]
    cluster.submit(1, list(range(33)), max_tokens=4)
    cluster.turn()
    cluster.submit(2, list(range(33)), max_tokens=2)
    cluster.finish()
    found = cluster.study("r2")

    assert found.lives[0].num_cached_tokens == 32
    assert _first(found) is CauseKind.BOUNDARY
