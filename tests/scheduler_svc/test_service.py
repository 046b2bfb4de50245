"""Promises of the scheduler process, with real sockets and peers that speak the protocols by hand."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import psutil
import pytest
import zmq
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.admin.v1 import admin_pb2
from quire_server.serve import lifeline
from shared.columns import from_column, to_column
from shared.frames import LINK_MAX_MESSAGE, LINK_VERSIONS, PLAN_MAX_MESSAGE, PLAN_VERSIONS
from shared.sockets import connect_dealer
from tests.shared.test_metrics import metrics_receiver

WAIT_S = 60

WAIT_MS = 20_000


class Peer:
    """A DEALER socket that speaks one of the protocols directly."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, name: str, max_message: int) -> None:
        self._socket = connect_dealer(context, address, identity=name.encode(), max_message=max_message)

    def send(self, message: "link_pb2.FrontendMessage | plan_pb2.WorkerMessage | bytes") -> None:
        """Sends one frame."""
        self._socket.send(message if isinstance(message, bytes) else message.SerializeToString())

    def receive(self) -> bytes:
        """The next frame."""
        assert self._socket.poll(WAIT_MS), "nothing came"
        return self._socket.recv()

    def has_message(self, timeout_ms: int = 0) -> bool:
        """Whether a frame is there, or comes in this time."""
        return bool(self._socket.poll(timeout_ms))

    def close(self) -> None:
        """Goes away without a word."""
        self._socket.close()


class FrontendPeer(Peer):
    """A front end."""

    def until(self, field: str) -> link_pb2.CoreMessage:
        """The next message in which `field` is set."""
        while True:
            message = link_pb2.CoreMessage.FromString(self.receive())
            if getattr(message, field) not in (b"", False) and (field != "ends" or message.ends):
                return message

    def hello(self, oldest: int = LINK_VERSIONS.oldest, newest: int = 0) -> link_pb2.CoreMessage:
        """Send a Hello with these versions, and wait for the state or a refusal."""
        self.send_hello(oldest, newest)
        while True:
            message = link_pb2.CoreMessage.FromString(self.receive())
            if message.HasField("state") or message.refused:
                return message

    def send_hello(self, oldest: int = LINK_VERSIONS.oldest, newest: int = 0) -> None:
        """Send a Hello with these versions."""
        hello = link_pb2.FrontendHello(
            protocol_version=oldest, newest_protocol_version=newest, frontend_id="f", incarnation=1
        )
        self.send(link_pb2.FrontendMessage(hello=hello))

    def families(self) -> list[link_pb2.MetricFamily]:
        """The metrics of the service, as of now."""
        self.send(link_pb2.FrontendMessage(snapshot_request=9))
        while (snapshot := link_pb2.CoreMessage.FromString(self.receive()).snapshot).request != 9:
            pass
        return list(snapshot.families)

    def metrics(self) -> list[link_pb2.MetricSample]:
        """All samples of the service, as of now."""
        return [sample for family in self.families() for sample in family.samples]

    def submit(self, stream: int, identity: bytes = b"", *, pooling: int = 0) -> None:
        """Submits a request of three tokens: one with an identity is resumable, one with `pooling` for an embedding."""
        submission = link_pb2.Submission(
            stream=stream,
            request_id=f"r{stream}",
            token_ids=to_column([1, 2, 3]),
            num_prompt_tokens=3,
            max_tokens=1 if pooling else 4,
            pooling=pooling,
            sampling=plan_pb2.SamplingParams(top_p=1).SerializeToString(),
            credit=1000,
            identity=identity,
        )
        self.send(link_pb2.FrontendMessage(submissions=[submission]))


class WorkerPeer(Peer):
    """A worker."""

    def until(self, body: str) -> plan_pb2.SchedulerMessage:
        """The next message with the given body."""
        while True:
            message = plan_pb2.SchedulerMessage.FromString(self.receive())
            if message.WhichOneof("body") == body:
                return message

    def hello(
        self, oldest: int = PLAN_VERSIONS.oldest, newest: int = 0, *, worker_id: str = "w", process: str = ""
    ) -> None:
        """Send a Hello with these versions."""
        model = plan_pb2.ModelInfo(name="m", fingerprint="f", max_model_len=64, vocab_size=100, hidden_size=2)
        hello = plan_pb2.Hello(
            protocol_version=oldest, newest_protocol_version=newest, worker_id=worker_id, incarnation=1, model=model,
            block_size=4, num_blocks=8,
            max_rows=4, max_tokens_per_step=64, num_kv_groups=1, device="cpu", pid=321, process=process,
        )  # fmt: skip
        self.send(plan_pb2.WorkerMessage(hello=hello))

    def answer(self, message: plan_pb2.SchedulerMessage, rows: list[int], tokens: list[int]) -> None:
        """Answers a plan."""
        result = plan_pb2.StepResult(step=message.plan.step, rows=to_column(rows), tokens=to_column(tokens))
        self.send(plan_pb2.WorkerMessage(epoch=message.epoch, result=result))


class Stand:
    """A scheduler process and the peers of one test; a context manager, at whose end no process is left.

    The process also ends with the process that runs the tests.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._frontends, self._workers = f"ipc://{folder}/f", f"ipc://{folder}/w"
        self._peers: list[Peer] = []
        self.killed = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire_server.cli.main", "scheduler", f"--frontend-address={self._frontends}",
             f"--worker-address={self._workers}", "--max-num-seqs=4", *flags],
            env=os.environ | {lifeline.ENVIRONMENT: str(os.getpid())},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def frontend(self) -> FrontendPeer:
        """Connects a front end."""
        peer = FrontendPeer(self._context, self._frontends, f"f/{len(self._peers)}", LINK_MAX_MESSAGE)
        self._peers.append(peer)
        return peer

    def worker(self) -> WorkerPeer:
        """Connects a worker."""
        peer = WorkerPeer(self._context, self._workers, f"w/{len(self._peers)}", PLAN_MAX_MESSAGE)
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        """Ends everything."""
        try:
            for peer in self._peers:
                peer.close()
            self._context.destroy(linger=0)
            if self.process.poll() is None:
                self.process.terminate()
                self.process.send_signal(signal.SIGCONT)  # A test that failed may have stopped it.
            assert self.process.wait(WAIT_S) == (-signal.SIGKILL if self.killed else 0)
        finally:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """Ends the scheduler at once."""
        self.killed = True
        self.process.kill()
        self.process.wait()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    """A running scheduler."""
    with Stand(tmp_path) as stand:
        yield stand


def test_no_process_is_left_after_a_test_that_fails(tmp_path: Path) -> None:
    """A test may fail before its end, even while the process is stopped."""
    stand = Stand(tmp_path)

    def fail() -> None:
        with stand:
            stand.frontend().hello()
            stand.process.send_signal(signal.SIGSTOP)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert stand.process.returncode == 0


def test_no_process_is_left_after_an_interruption(tmp_path: Path) -> None:
    """A scheduler ends with the process that began it, even if the latter is killed."""
    begin = (
        "import pathlib, sys, time\n"
        "from tests.scheduler_svc.test_service import Stand\n"
        "stand = Stand(pathlib.Path(sys.argv[1]))\n"
        "stand.frontend().hello()\n"
        "print(stand.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", begin, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.getcwd()}) as test:
        assert test.stdout is not None
        scheduler = psutil.Process(int(test.stdout.readline()))
        test.kill()

        assert not psutil.wait_procs([scheduler], timeout=WAIT_S)[1]


def test_a_request_runs_from_submission_to_end(stand: Stand) -> None:
    """A front end and a worker that only implement the protocols complete one request, token by token."""
    frontend, worker = stand.frontend(), stand.worker()
    assert not frontend.hello().state.ready
    worker.hello()
    welcome = worker.until("welcome")
    assert frontend.until("state").state.model.max_model_len == 8 * 4
    frontend.submit(7)
    delivered: list[int] = []
    for step in range(1, 5):
        plan = worker.until("plan")
        assert (plan.epoch, plan.plan.step) == (welcome.epoch, step)
        if step == 1:
            (admission,) = plan.plan.admissions
            assert from_column(admission.token_ids).tolist() == [1, 2, 3]
            row = admission.row
        worker.answer(plan, [row], [10 + step])
        message = frontend.until("tokens")
        assert from_column(message.streams).tolist() == [7]
        assert from_column(message.first_indices).tolist() == [len(delivered)]
        delivered += from_column(message.tokens).tolist()
    assert delivered == [11, 12, 13, 14]
    ends = message.ends or frontend.until("ends").ends
    assert [(end.stream, end.reason) for end in ends] == [(7, link_pb2.END_REASON_LENGTH)]


def test_the_metrics_have_one_family_each(stand: Stand) -> None:
    """However many workers there are, a metric is one family with the samples of all."""
    frontend = stand.frontend()
    frontend.hello()
    for name in ("one", "two"):
        worker = stand.worker()
        worker.hello(worker_id=name)
        worker.until("welcome")
    families = frontend.families()

    found = [family.name for family in families]
    assert len(set(found)) == len(found)
    (blocks,) = [family for family in families if family.name == "quire_kv_blocks"]
    assert {sample.labels["worker"] for sample in blocks.samples} == {"one", "two"}


def test_the_last_metrics_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, a scheduler exports metrics that are not due yet."""
    with metrics_receiver() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
        with Stand(tmp_path) as stand:
            stand.frontend().hello()
        exported = received.get(timeout=30)

    (frontends,) = [each for each in exported if each.name == "quire.frontends"]
    assert [point.as_double for point in frontends.gauge.data_points] == [1]


def test_a_wrong_variable_is_reported_in_one_line(tmp_path: Path) -> None:
    """The scheduler does not start with a number that OpenTelemetry's variables do not permit."""
    failed = subprocess.run(
        [sys.executable, "-m", "quire_server.cli.main", "scheduler", f"--frontend-address=ipc://{tmp_path}/f",
         f"--worker-address=ipc://{tmp_path}/w"],
        env={**os.environ, "OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": "5s"},
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip

    assert failed.returncode == 1
    assert failed.stderr.decode().startswith("quire scheduler: OTEL_METRIC_EXPORT_INTERVAL: '5s' is not a positive")


def test_an_embedding_travels_from_the_worker_to_the_front_end(stand: Stand) -> None:
    """The worker gets the row's purpose, its vector ends the request, and the row leaves."""
    frontend, worker = stand.frontend(), stand.worker()
    frontend.hello()
    worker.hello()
    assert frontend.until("state").state.model.hidden_size == 2
    frontend.submit(7, pooling=plan_pb2.POOLING_LAST)
    plan = worker.until("plan")
    (admission,) = plan.plan.admissions
    assert admission.pooling == plan_pb2.POOLING_LAST
    vector = np.array([0.5, -2.0], "<f4").tobytes()
    embedding = plan_pb2.RowEmbedding(row=admission.row, generation=admission.generation, values=vector)
    result = plan_pb2.StepResult(step=plan.plan.step, embeddings=[embedding])
    worker.send(plan_pb2.WorkerMessage(epoch=plan.epoch, result=result))

    (end,) = frontend.until("ends").ends
    assert (end.stream, end.reason, end.embedding) == (7, link_pb2.END_REASON_EMBEDDED, vector)
    assert from_column(worker.until("plan").plan.leaves).tolist() == [admission.row]


def test_the_log_level_reaches_every_process(stand: Stand) -> None:
    """Front ends get the level with the state, workers with their next ping; so do processes that join later."""
    frontend, worker = stand.frontend(), stand.worker()
    assert frontend.hello().state.log_level == ""
    worker.hello()
    assert worker.until("ping").ping.log_level == ""
    order = link_pb2.OperatorRequest(number=3)
    order.call.Pack(admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_WARNING))
    frontend.send(link_pb2.FrontendMessage(operator_requests=[order]))
    message = frontend.until("operator_replies")
    while not message.operator_replies:
        message = link_pb2.CoreMessage.FromString(frontend.receive())
    while worker.until("ping").ping.log_level != "warning":
        pass

    (reply,), answer = message.operator_replies, admin_pb2.SetLogLevelResponse()
    assert reply.response.Unpack(answer)
    assert (reply.number, answer.previous) == (3, admin_pb2.LOG_LEVEL_INFO)
    assert message.state.log_level == "warning"
    assert stand.frontend().hello().state.log_level == "warning"


def test_a_vanished_worker_is_noticed_and_replaced(stand: Stand) -> None:
    """A worker with a broken connection is lost without any timeout, and the next one continues its requests."""
    frontend, first = stand.frontend(), stand.worker()
    frontend.hello()
    first.hello()
    frontend.submit(1)
    plan = first.until("plan")
    first.answer(plan, [plan.plan.admissions[0].row], [42])
    frontend.until("tokens")
    first.close()
    second = stand.worker()
    second.hello()
    (admission,) = second.until("plan").plan.admissions
    assert from_column(admission.token_ids).tolist() == [1, 2, 3, 42]
    assert admission.num_prompt_tokens == 3


def test_a_worker_whose_process_dies_is_lost_before_its_connection_goes(stand: Stand) -> None:
    """A dead worker is lost although its connection is still open, and its request continues elsewhere.

    The connection stands until the kernel has freed the memory of the process.
    """
    name = "from shared.process_watch import own_process; print(own_process(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        frontend, first = stand.frontend(), stand.worker()
        frontend.hello()
        first.hello(process=process.stdout.readline().strip())
        frontend.submit(1)
        first.until("plan")
        process.kill()
    second = stand.worker()
    # Use another name, so that its Hello does not displace the first worker.
    second.hello(worker_id="second")
    (admission,) = second.until("plan").plan.admissions

    assert from_column(admission.token_ids).tolist() == [1, 2, 3]


def test_hellos_that_cannot_be_answered_do_no_harm(stand: Stand) -> None:
    """After hundreds of hellos that can no longer be answered, read in one go, the next peer is served."""
    first = stand.worker()
    first.hello()
    first.until("welcome")
    stand.process.send_signal(signal.SIGSTOP)
    for _ in range(700):  # Enough that none of them waits for room.
        first.hello()
    first.close()
    stand.process.send_signal(signal.SIGCONT)
    frontend, second = stand.frontend(), stand.worker()
    frontend.hello()
    second.hello(worker_id="second")
    frontend.submit(1)

    assert second.until("plan").plan.admissions


def test_a_front_end_that_says_goodbye_is_forgotten_at_once(stand: Stand) -> None:
    """The core does not wait for the front end's lease or connection.

    A further frame would come from an unknown peer.
    """
    frontend = stand.frontend()
    frontend.hello()
    frontend.send(link_pb2.FrontendMessage(goodbye=True))
    frontend.submit(1)

    assert frontend.until("unknown").unknown


def test_an_unknown_peer_is_asked_to_say_hello(stand: Stand) -> None:
    """An earlier scheduler's peer is asked to send another Hello when it sends its first frame."""
    frontend, worker = stand.frontend(), stand.worker()
    frontend.submit(1)
    assert frontend.until("unknown").unknown
    worker.send(plan_pb2.WorkerMessage(epoch=5, result=plan_pb2.StepResult(step=1)))
    worker.until("unknown")


def test_neighbouring_versions_speak_the_newest_that_both_know(stand: Stand) -> None:
    """Workers and front ends one version older or newer are served in a common version.

    So are those from before versions were negotiated.
    """
    ours = LINK_VERSIONS
    for oldest, newest, spoken in (
        (ours.oldest, 0, ours.oldest), (ours.oldest - 1, ours.oldest, ours.oldest), (1, 99, ours.newest),
        (ours.newest, ours.newest + 1, ours.newest),
    ):  # fmt: skip
        assert stand.frontend().hello(oldest, newest).protocol_version == spoken
    plan = PLAN_VERSIONS
    for oldest, newest, spoken in (
        (plan.oldest, 0, plan.oldest), (plan.oldest - 1, plan.oldest, plan.oldest), (1, 99, plan.newest),
        (plan.newest, plan.newest + 1, plan.newest),
    ):  # fmt: skip
        worker = stand.worker()
        worker.hello(oldest, newest)
        assert worker.until("welcome").welcome.protocol_version == spoken


@pytest.mark.parametrize(("oldest", "newest", "behind"), [(98, 99, "scheduler"), (1, 0, "peer"), (0, 0, "peer")])
def test_versions_too_far_apart_are_refused(stand: Stand, oldest: int, newest: int, behind: str) -> None:
    """A peer without a common version gets both sides' versions and the side to upgrade."""
    worker, frontend = stand.worker(), stand.frontend()
    worker.hello(oldest, newest)
    reason = worker.until("refused").refused.reason
    if oldest != 1:
        refused = frontend.hello(oldest, newest).refused
        assert f"scheduler {LINK_VERSIONS}" in refused
        assert f"upgrade the {'front end' if behind == 'peer' else behind}" in refused
    theirs = f"{oldest} to {newest}" if newest > oldest else f"{oldest}"
    assert f"supports version {theirs}, the scheduler" in reason
    assert f"scheduler {PLAN_VERSIONS}" in reason
    assert f"upgrade the {'worker' if behind == 'peer' else behind}" in reason


def test_nonsense_is_dropped_and_counted(stand: Stand) -> None:
    """Malformed frames on either socket are counted in the metrics and change nothing."""
    frontend, worker = stand.frontend(), stand.worker()
    frontend.hello()
    for _ in range(20):
        frontend.send(b"\xff" * 50)
        worker.send(b"\xff" * 50)
    worker.hello()
    worker.until("welcome")
    values = {sample.name: sample.value for sample in frontend.metrics()}
    assert values["quire_malformed_frames_total"] == 40


def test_a_workers_metrics_leave_with_it(stand: Stand) -> None:
    """A worker's metrics are removed when it leaves; a new worker with the same name gets its own series."""
    frontend, first, second = stand.frontend(), stand.worker(), stand.worker()
    timings = plan_pb2.StepTimings(forward_ns=2_000_000_000)
    frontend.hello()
    frontend.submit(1)

    def serve(worker: WorkerPeer) -> float:
        """Joins as w, answers one plan, and returns how long w has computed."""
        worker.hello()
        plan = worker.until("plan")
        row = plan.plan.admissions[0].row
        result = plan_pb2.StepResult(step=plan.plan.step, rows=to_column([row]), tokens=to_column([5]), timings=timings)
        worker.send(plan_pb2.WorkerMessage(epoch=plan.epoch, result=result))
        frontend.until("tokens")
        return next(
            sample.value
            for sample in frontend.metrics()
            if sample.name == "quire_worker_seconds_total" and sample.labels["phase"] == "forward"
        )

    assert serve(first) == 2
    assert serve(second) == 4, "the first one was replaced while its series was there"
    second.send(plan_pb2.WorkerMessage(goodbye=plan_pb2.Goodbye(reason="scaled down")))
    while frontend.until("state").state.ready:
        pass
    left = frontend.metrics()
    assert not [sample for sample in left if "worker" in sample.labels]
    values = {sample.name: sample.value for sample in left}
    assert values["quire_workers_joined_total"] == 2
    assert values["quire_workers_lost_total"] == 1, "the first one said no goodbye"


def test_a_scheduler_without_the_record_that_it_should_have_says_so(tmp_path: Path) -> None:
    """A folder that another scheduler records into: quire_record_writes is 0, and absent with --record-dir off."""
    found = []
    with Stand(tmp_path, f"--record-dir={tmp_path / 'record'}") as first:
        for number, place in enumerate((str(tmp_path / "record"), "off")):
            folder = tmp_path / str(number)
            folder.mkdir()
            frontend = first.frontend()
            frontend.hello()
            frontend.metrics()  # By now the first journal has its folder.
            with Stand(folder, f"--record-dir={place}") as second:
                frontend = second.frontend()
                frontend.hello()
                found.append([sample.value for sample in frontend.metrics() if sample.name == "quire_record_writes"])

    assert found == [[0.0], []]


def test_sampling_parameters_reach_the_worker_as_the_front_end_encoded_them(stand: Stand) -> None:
    """The scheduler forwards the bytes and reads nothing in them, even if no reader could."""
    frontend, worker = stand.frontend(), stand.worker()
    frontend.hello()
    worker.hello()
    sampling = [b"\xff" * 9, plan_pb2.SamplingParams(top_k=7).SerializeToString()]
    submissions = [
        link_pb2.Submission(
            stream=stream, token_ids=to_column([1]), num_prompt_tokens=1, max_tokens=4, sampling=each, credit=1000
        )
        for stream, each in enumerate(sampling, 1)
    ]
    frontend.send(link_pb2.FrontendMessage(submissions=submissions))

    assert [admission.sampling for admission in worker.until("plan").plan.admissions] == sampling


def test_an_operator_drains_and_resumes_a_worker(stand: Stand) -> None:
    """Drain and resume return the worker's state; an unknown name is not found."""
    frontend, worker = stand.frontend(), stand.worker()
    frontend.hello()
    worker.hello()
    worker.until("welcome")

    drained, resumed = admin_pb2.DrainWorkerResponse(), admin_pb2.ResumeWorkerResponse()
    assert _operate(frontend, admin_pb2.DrainWorkerRequest(worker_id="w")).response.Unpack(drained)
    assert (drained.worker.worker_id, drained.worker.draining) == ("w", True)
    assert _operate(frontend, admin_pb2.ResumeWorkerRequest(worker_id="w")).response.Unpack(resumed)
    assert not resumed.worker.draining
    unknown = _operate(frontend, admin_pb2.DrainWorkerRequest(worker_id="nobody"))
    assert (unknown.HasField("response"), unknown.error.reason) == (False, "WORKER_NOT_FOUND")
    workers = admin_pb2.ListWorkersResponse()
    assert _operate(frontend, admin_pb2.ListWorkersRequest()).response.Unpack(workers)
    (listed,) = workers.workers
    assert (listed.total_blocks, listed.device, listed.pid) == (8, "cpu", 321)


@pytest.mark.parametrize(
    "method", list(admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods), ids=lambda method: method.name
)
def test_every_method_of_the_operator_api_is_answered(stand: Stand, method: MethodDescriptor) -> None:
    """Every method returns its own type or a specific error; none is unknown to the scheduler."""
    frontend = stand.frontend()
    frontend.hello()

    reply = _operate(frontend, GetMessageClass(method.input_type)())

    expected = (GetMessageClass(method.output_type).DESCRIPTOR.full_name, "")
    found = (reply.response.TypeName(), reply.error.reason)
    assert found == expected or found[1] in ("INVALID_REQUEST", "REQUEST_NOT_FOUND", "WORKER_NOT_FOUND")


def test_an_unusable_operator_call_is_refused_alone(stand: Stand) -> None:
    """A call with an unknown type, or one that does not parse, gets an error; the scheduler continues."""
    frontend = stand.frontend()
    frontend.hello()
    unknown = link_pb2.OperatorRequest(number=5)
    unknown.call.Pack(link_pb2.StreamEnd())
    broken = link_pb2.OperatorRequest(number=5)
    broken.call.Pack(admin_pb2.GetStoryRequest(request_id="r"))
    broken.call.value = b"\xff"

    assert _reply_to(frontend, unknown).error.reason == "UNSUPPORTED_METHOD"
    assert _reply_to(frontend, broken).error.reason == "INVALID_REQUEST"
    assert _reply_to(frontend, link_pb2.OperatorRequest(number=5)).error.reason == "UNSUPPORTED_METHOD"
    assert _operate(frontend, admin_pb2.ListWorkersRequest()).HasField("response")


def _operate(frontend: FrontendPeer, call: Message) -> link_pb2.OperatorReply:
    request = link_pb2.OperatorRequest(number=5)
    request.call.Pack(call)
    return _reply_to(frontend, request)


def _reply_to(frontend: FrontendPeer, request: link_pb2.OperatorRequest) -> link_pb2.OperatorReply:
    frontend.send(link_pb2.FrontendMessage(operator_requests=[request]))
    while not (replies := link_pb2.CoreMessage.FromString(frontend.receive()).operator_replies):
        pass
    (reply,) = replies
    return reply


def test_shutdown_leaves_live_requests_to_the_front_ends(stand: Stand) -> None:
    """SIGTERM ends the process with exit code 0, and no request: front ends keep those for the next scheduler.

    The scheduler says that it ends, so that front ends do not count a failure.
    """
    frontend = stand.frontend()
    frontend.hello()
    frontend.submit(1)
    stand.process.send_signal(signal.SIGTERM)
    assert not frontend.until("leaves").ends
    assert stand.process.wait(20) == 0
    assert not frontend.has_message()


def test_shutdown_can_end_live_requests(tmp_path: Path) -> None:
    """With --on-stop=end, SIGTERM ends every live request with SHUTDOWN."""
    stand = Stand(tmp_path, "--on-stop=end")
    frontend = stand.frontend()
    frontend.hello()
    frontend.submit(1)
    frontend.send(link_pb2.FrontendMessage(report=link_pb2.MetricReport()))
    frontend.until("state")
    stand.process.send_signal(signal.SIGTERM)
    (end,) = frontend.until("ends").ends
    assert end.reason == link_pb2.END_REASON_SHUTDOWN
    assert stand.process.wait(20) == 0
    stand.close()


@pytest.mark.parametrize("fsync", ["none", "interval", "step"])
def test_delivered_tokens_survive_the_scheduler(tmp_path: Path, fsync: str) -> None:
    """After the scheduler is killed between two steps, a resumed request has all tokens that any client received.

    The next scheduler reports how far the request had come.
    """
    flags = (f"--journal={tmp_path / 'journal'}", f"--journal-fsync={fsync}")
    first = Stand(tmp_path, *flags)
    frontend, worker = first.frontend(), first.worker()
    frontend.hello()
    worker.hello()
    frontend.submit(7, b"identity")
    told: list[int] = []
    for step in (1, 2):
        worker.answer(worker.until("plan"), [0], [10 + step])
        told += from_column(frontend.until("tokens").tokens).tolist()
    first.kill()
    first.close()

    second = Stand(tmp_path, *flags)
    frontend = second.frontend()
    frontend.hello()
    question = link_pb2.ResumeQuestion(number=3, identity=b"identity")
    frontend.send(link_pb2.FrontendMessage(resume_questions=[question]))
    while not (message := link_pb2.CoreMessage.FromString(frontend.receive())).resume_replies:
        pass
    (reply,) = message.resume_replies
    assert (reply.number, reply.not_found, reply.HasField("end")) == (3, False, False)
    assert told == [11, 12]
    assert from_column(reply.submission.token_ids).tolist() == [1, 2, 3, *told]
    assert (reply.submission.request_id, reply.submission.max_tokens) == ("r7", 4)
    second.close()
