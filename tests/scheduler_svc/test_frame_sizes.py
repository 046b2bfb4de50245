"""No frame exceeds its receiver's limit, whatever legal requests contain; ZeroMQ would drop the connection.

The front end bounds legal requests; these tests use the extremes of what it accepts.
"""

import dataclasses
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from records.rules.model_worker import ModelWorker
from scheduler_svc import service as service_module
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import BlockCopy, Plan, RowAdmission
from scheduler_svc.core.interface.records import EndReason, Log
from scheduler_svc.frontend import link as frontend_link
from scheduler_svc.frontend.hub import FrontendHub
from scheduler_svc.frontend.link import Outgoing
from scheduler_svc.service import SchedulerService
from scheduler_svc.worker import link as worker_link
from shared.columns import from_column, to_column
from shared.config import SchedulerConfig
from shared.frames import (
    LINK_MAX_MESSAGE,
    MAX_PART_BYTES,
    MAX_SERVED_SEQUENCE,
    MAX_STEP_VECTOR_BYTES,
    PACKED_BYTES,
    PLAN_MAX_MESSAGE,
    FrameTooLargeError,
)
from shared.request_spec import Pooling, RequestSpec
from shared.sockets import connect_dealer, receive_from
from shared.telemetry import Telemetry
from tests.examples import examples
from tests.scheduler_svc.cluster import FRONTEND, Cluster, Reader
from tests.scheduler_svc.requests import make_arrival, split_fields
from tests.scheduler_svc.test_service import FrontendPeer, WorkerPeer

MIB = 1 << 20
LARGE_SET = plan_pb2.SamplingParams(allowed_token_ids=bytes(MIB)).SerializeToString()


def _arrived(stream: int = 1, **changes: Any) -> ev.RequestArrived:
    return make_arrival(FRONTEND, stream, **changes)


def _log(request_id: str, num_tokens: int, scores: tuple[tuple[int, bytes], ...] = ()) -> Log:
    tokens = np.arange(num_tokens, dtype="<i4")
    return Log(_arrived(request_id=request_id, num_prompt_tokens=num_tokens).spec, tokens.tobytes(), scores, None)


def _encode(plan: Plan) -> bytes:
    return worker_link.encode_plan(plan, step_traceparent="", attempt_traceparents={})


def _admission(**changes: Any) -> RowAdmission:
    of_spec, others = split_fields(changes)
    values: dict[str, object] = {
        "row": (1 << 16) - 1,
        "generation": 0x7FFFFFFF,
        "spec": RequestSpec(request_id="r", num_prompt_tokens=8, max_tokens=5)._replace(**of_spec),
        "token_ids": np.zeros(8, np.int32),
        "num_computed_tokens": 0,
        "blocks": np.zeros(1, np.intp),
        "frontend": FRONTEND,
        "stream": 1,
        "attempt": 0,
        "queued_since": 0.0,
    }
    return RowAdmission(**(values | others))  # type: ignore[arg-type]


def _plan(**changes: object) -> Plan:
    columns = ("leaves", "append_rows", "append_blocks", "chunk_rows", "chunk_lengths", "holds", "releases")
    values: dict[str, object] = {
        **dict.fromkeys(columns, np.zeros(0, np.intp)),
        "worker": b"w",
        "epoch": 1 << 63,
        "step": 7,
        "admissions": (),
        "num_decodes": 0,
        "num_tokens": 0,
        "traced_rows": (),
    }
    return Plan(**(values | changes))  # type: ignore[arg-type]


def test_a_plan_is_bounded_in_bytes() -> None:
    """Of 64 requests with large token sets, a plan admits as many as fit into a frame; all of them run."""
    cluster = Cluster(max_num_seqs=64, max_num_batched_tokens=4096)
    cluster.join(ModelWorker(b"w/1", 4000, 16, 64, max_tokens_per_step=4096))
    for stream in range(1, 65):
        cluster.readers[stream] = Reader(list(range(8)), 5, set())
        cluster.handle(_arrived(stream, sampling=LARGE_SET))
    cluster.run()

    assert sum(len(plan.admissions) for plan in cluster.plans) == 64
    assert max(len(_encode(plan)) for plan in cluster.plans) <= PACKED_BYTES + MAX_PART_BYTES
    assert all(reader.end is not None and reader.end.reason is EndReason.LENGTH for reader in cluster.readers.values())


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1000, MIB, 7 * MIB]), st.sampled_from([1, 200, 3000])), max_size=16))
def test_no_plan_is_too_large(requests: list[tuple[int, int]]) -> None:
    """Requests with parameters and prompts of any legal weight, in any mix, all run, in plans that a frame holds."""
    cluster = Cluster(max_num_seqs=16, max_num_batched_tokens=4096)
    cluster.join(ModelWorker(b"w/1", 4000, 16, 16, max_tokens_per_step=4096))
    for stream, (weight, num_tokens) in enumerate(requests, 1):
        prompt = [stream] * num_tokens
        cluster.readers[stream] = Reader(prompt, 2, set())
        cluster.handle(
            _arrived(
                stream,
                token_ids=np.array(prompt, np.int32),
                num_prompt_tokens=num_tokens,
                max_tokens=2,
                sampling=plan_pb2.SamplingParams(allowed_token_ids=bytes(weight)).SerializeToString(),
            )
        )
    cluster.run()

    assert all(len(_encode(plan)) <= PACKED_BYTES + MAX_PART_BYTES for plan in cluster.plans)
    assert all(reader.end is not None and reader.end.reason is EndReason.LENGTH for reader in cluster.readers.values())


def test_the_largest_plan_fits_into_a_frame() -> None:
    """The largest plan fits into a frame.

    The plan has as many admissions as possible, the last one of the largest legal size. It also moves every block of
    the largest pool and names every row of the largest table.
    """
    rows, blocks = np.arange(1 << 16), np.arange(1 << 21)
    heaviest = _admission(
        token_ids=np.zeros(MAX_SERVED_SEQUENCE, np.int32),
        blocks=np.zeros(MAX_SERVED_SEQUENCE, np.intp),
        sampling=plan_pb2.SamplingParams(
            allowed_token_ids=bytes(MAX_PART_BYTES - 4 * MAX_SERVED_SEQUENCE - 64)
        ).SerializeToString(),
    )
    others = _admission(token_ids=np.zeros(PACKED_BYTES // 4, np.int32))
    move = BlockCopy(copy_id=1 << 30, sources=blocks, targets=blocks)
    frame = _encode(
        _plan(
            admissions=(others, heaviest),
            leaves=rows,
            append_rows=rows,
            append_blocks=rows,
            chunk_rows=rows,
            chunk_lengths=rows,
            holds=rows,
            releases=rows,
            copy_sources=rows,
            copy_targets=rows,
            swap_outs=(move,),
            swap_ins=(move,),
        )
    )
    assert len(frame) <= PLAN_MAX_MESSAGE


def test_a_plan_that_no_frame_takes_is_an_error_that_names_the_request() -> None:
    """The plan is not sent, so that the connection survives; the error names the largest request."""
    heavy = _admission(
        request_id="heavy", sampling=plan_pb2.SamplingParams(bad_words=[bytes(40 * MIB)]).SerializeToString()
    )
    light = _admission(
        request_id="light", sampling=plan_pb2.SamplingParams(bad_words=[bytes(30 * MIB)]).SerializeToString()
    )
    with pytest.raises(FrameTooLargeError, match=r"plan 7: \d+ bytes.* request heavy has"):
        _encode(_plan(admissions=(light, heavy, light)))


def test_the_largest_answer_of_log_probabilities_and_embeddings_is_bounded_by_the_plan() -> None:
    """A step completes as many embeddings as fit into its result; the others complete in the next steps."""
    hidden_size = MAX_STEP_VECTOR_BYTES // 4 // 2
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=256)
    worker = ModelWorker(b"w/1", 64, 4, 8, max_tokens_per_step=256)
    hello = worker.hello()
    (welcome,) = cluster.handle(
        dataclasses.replace(hello, model=dataclasses.replace(hello.model, hidden_size=hidden_size))
    )[:1]
    assert isinstance(welcome, ef.WorkerWelcomed)
    worker.welcome(welcome.epoch)
    for stream in range(1, 6):
        cluster.readers[stream] = Reader(list(range(8)), 1, set())
        cluster.handle(_arrived(stream, max_tokens=1, pooling=Pooling.LAST))
    completed = []
    while (plan := cluster.core.plan(worker.peer, cluster.now)[0]) is not None:
        answer = worker.execute(plan)
        vectors = [dataclasses.replace(each, values=bytes(4 * hidden_size)) for each in answer.embeddings]
        worker.answered_step = answer.step
        cluster.handle(dataclasses.replace(answer, embeddings=vectors))
        completed.append(len(vectors))
    assert max(completed) == 2
    assert sum(completed) == 5
    ends = [reader.end for reader in cluster.readers.values()]
    assert all(end is not None and end.reason is EndReason.EMBEDDED for end in ends)


def test_a_model_of_longer_sequences_is_served_up_to_what_a_frame_holds() -> None:
    """Whatever a model's positions allow, no sequence becomes longer than the tokens that a frame holds."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w/1", 1 << 12, 1 << 10, 2, max_model_len=10_000_000))
    assert cluster.core.service_state().max_model_len == MAX_SERVED_SEQUENCE


@pytest.mark.parametrize("field", ["sampling", "grammar", "block_keys", "token_ids", "request_id"])
def test_a_request_that_no_frame_would_take_is_refused_at_the_door(field: str) -> None:
    """Whichever field makes it heavy, it ends INVALID and alone."""
    good = link_pb2.Submission(stream=1, request_id="g", token_ids=bytes(8), num_prompt_tokens=2, max_tokens=1)
    heavy = link_pb2.Submission(
        stream=2, request_id="h", token_ids=bytes(4 * MAX_SERVED_SEQUENCE), num_prompt_tokens=2, max_tokens=1
    )
    match field:
        case "sampling":
            heavy.sampling = plan_pb2.SamplingParams(allowed_token_ids=bytes(8 * MIB)).SerializeToString()
        case "grammar":
            heavy.grammar = bytes(8 * MIB)
        case "block_keys":
            heavy.block_keys, heavy.block_size = bytes(8 * MIB), 1
        case "token_ids":
            heavy.token_ids += bytes(4)
        case "request_id":
            heavy.request_id = "h" * 8 * MIB
    frame = link_pb2.FrontendMessage(submissions=[heavy, good]).SerializeToString()

    incoming = frontend_link.decode(b"f", frame, 0.0)

    assert [end.stream for end in incoming.refused] == [2]
    assert [event.stream for event in incoming.events if isinstance(event, ev.RequestArrived)] == [1]


def test_the_size_of_a_request_includes_its_longest_output() -> None:
    """A short prompt with large parameters and a long output counts with all of its output."""
    submission = link_pb2.Submission(
        stream=1, token_ids=bytes(8), num_prompt_tokens=2, max_tokens=MAX_SERVED_SEQUENCE,
        sampling=plan_pb2.SamplingParams(allowed_token_ids=bytes(9 * MIB)).SerializeToString(),
    )  # fmt: skip
    with pytest.raises(frontend_link.UnusableSubmissionError, match="shorten its token sets"):
        frontend_link.arrival(b"f", submission, 0.0)
    submission.max_tokens = 100
    assert frontend_link.arrival(b"f", submission, 0.0).spec.max_tokens == 100


def test_many_resumes_at_once_make_several_frames() -> None:
    """When a front end has died, 110 clients come back at once, each for 40,000 tokens."""
    outgoing = Outgoing()
    for number in range(110):
        log = _log(f"r{number}", 40_000)
        outgoing.add_resume(ef.ResumeAnswered(frontend=FRONTEND, number=number, log=log))
    frames = outgoing.encode(1)

    assert max(map(len, frames)) <= PACKED_BYTES + 1024
    replies = [reply for frame in frames for reply in link_pb2.CoreMessage.FromString(frame).resume_replies]
    assert [(reply.number, len(reply.submission.token_ids)) for reply in replies] == [(n, 160_000) for n in range(110)]


def test_a_log_that_no_frame_takes_is_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    """A log that an older front end has accepted is reported as missing, and a log line names its owner."""
    outgoing = Outgoing()
    scores = tuple((index, bytes(200)) for index in range(MAX_PART_BYTES // 200))
    outgoing.add_resume(ef.ResumeAnswered(frontend=FRONTEND, number=5, log=_log("huge", 10, scores)))
    outgoing.add_resume(ef.ResumeAnswered(frontend=FRONTEND, number=6, log=_log("small", 10)))
    (frame,) = outgoing.encode(1)

    replies = link_pb2.CoreMessage.FromString(frame).resume_replies
    assert [(reply.number, reply.not_found, reply.submission.request_id) for reply in replies] == [
        (5, True, ""),
        (6, False, "small"),
    ]
    captured = capsys.readouterr()
    assert "the log of request huge" in captured.out + captured.err


SIZES = st.sampled_from([0, 100, 100_000, PACKED_BYTES - 100, PACKED_BYTES + 100, MAX_PART_BYTES - 4096])


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["scores", "tokens", "end", "resume", "state", "snapshot"]), SIZES), max_size=12)
)
def test_no_frame_to_a_front_end_is_too_large(parts: list[tuple[str, int]]) -> None:
    """Everything for a front end in one turn, in any mix, arrives complete and in order, in frames within its limit."""
    outgoing = Outgoing()
    for number, (kind, size) in enumerate(parts, 1):
        match kind:
            case "scores":
                outgoing.add_scores(
                    ef.ScoresReady(frontend=FRONTEND, stream=number, first_index=0, of_prompt=True, scores=bytes(size))
                )
            case "tokens":
                column = np.arange(size // 12, dtype=np.int32)
                outgoing.add_tokens(
                    ef.TokensReady(frontend=FRONTEND, streams=column, first_indices=column + 1, tokens=column + 2)
                )
            case "end":
                outgoing.add_end(
                    ef.RequestEnded(
                        frontend=FRONTEND,
                        stream=number,
                        request_id="",
                        reason=EndReason.EMBEDDED,
                        embedding=bytes(size),
                    )
                )
            case "resume":
                log = _log(f"r{number}", size // 4)
                outgoing.add_resume(ef.ResumeAnswered(frontend=FRONTEND, number=number, log=log))
            case "state":
                state = ef.ServiceChanged(
                    ready=True, model=None, max_model_len=1, block_size=1, max_call_requests=1, max_call_tokens=1
                )
                outgoing.set_state(state, "")
            case "snapshot":
                outgoing.set_snapshot(number, [link_pb2.MetricFamily(help="x" * size)])
    frames = outgoing.encode(3)

    assert max(map(len, frames)) <= LINK_MAX_MESSAGE
    messages = [link_pb2.CoreMessage.FromString(frame) for frame in frames]
    assert all(message.incarnation == 3 for message in messages)
    kinds = [(kind, number, size) for number, (kind, size) in enumerate(parts, 1)]
    tokens = [value for kind, _, size in kinds if kind == "tokens" for value in range(size // 12)]
    for offset, name in enumerate(("streams", "first_indices", "tokens")):
        found = np.concatenate([from_column(getattr(message, name)) for message in messages]) - offset
        assert found.tolist() == tokens
    found_scores = [(each.stream, len(each.scores)) for message in messages for each in message.scores]
    assert found_scores == [(number, size) for kind, number, size in kinds if kind == "scores"]
    ends = [(end.stream, len(end.embedding)) for message in messages for end in message.ends]
    assert ends == [(number, size) for kind, number, size in kinds if kind == "end"]
    replies = [(reply.number, reply.not_found) for message in messages for reply in message.resume_replies]
    assert replies == [(number, False) for kind, number, _ in kinds if kind == "resume"]
    assert [message.HasField("state") for message in messages].count(True) == any(kind == "state" for kind, _ in parts)
    assert sum(message.HasField("snapshot") for message in messages) == any(kind == "snapshot" for kind, _ in parts)
    order = [
        kind
        for message in messages
        for kind in ("scores", "tokens", "ends", "resume_replies")
        if len(getattr(message, kind))
    ]
    assert order == sorted(order, key=["scores", "tokens", "ends", "resume_replies"].index)


def test_frames_of_one_turn_arrive_over_one_connection(tmp_path: Path) -> None:
    """More than a frame takes reaches a front end in order, and its connection stays."""
    address = f"ipc://{tmp_path}/f"
    with zmq.Context() as context:
        hub = FrontendHub(context, address, incarnation=1, lease_s=10.0)
        dealer = connect_dealer(context, address, identity=b"f", max_message=LINK_MAX_MESSAGE)
        dealer.send(b"")
        assert hub.socket.poll(20_000)
        receive_from(hub.socket)
        hub.heard(b"f", 0.0, version=1)
        for number in range(3):
            log = _log(f"r{number}", 2 * MIB)
            hub.outgoing(b"f").add_resume(ef.ResumeAnswered(frontend=b"f", number=number, log=log))
        assert hub.flush() == {}
        hub.outgoing(b"f").set_snapshot(9, [])
        assert hub.flush() == {}
        numbers: list[int] = []
        while True:
            assert dealer.poll(20_000), "the connection was dropped"
            message = link_pb2.CoreMessage.FromString(dealer.recv())
            numbers += [reply.number for reply in message.resume_replies]
            if message.HasField("snapshot"):
                break
        assert numbers == [0, 1, 2]
        for socket in (dealer, hub.socket):
            socket.close()


def test_a_plan_that_cannot_be_sent_costs_an_epoch_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a plan is too large to send, its worker begins a new epoch and the requests are planned one by one.

    The log names the largest request. No request is lost.
    """
    monkeypatch.setattr(worker_link, "PLAN_MAX_MESSAGE", 130)
    config = SchedulerConfig(frontend_address=f"ipc://{tmp_path}/f", worker_address=f"ipc://{tmp_path}/w")
    telemetry = Telemetry("test")
    service = SchedulerService(config, telemetry, 1 << 40)
    thread = threading.Thread(target=service.run)
    thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend = FrontendPeer(context, config.frontend_address, "f/1", LINK_MAX_MESSAGE)
    worker = WorkerPeer(context, config.worker_address, "w/1", PLAN_MAX_MESSAGE)
    try:
        frontend.hello()
        submissions = [
            link_pb2.Submission(
                stream=stream,
                request_id=f"r{stream}",
                token_ids=to_column(range(stream, stream + 10)),
                num_prompt_tokens=10,
                max_tokens=2,
                credit=99,
            )
            for stream in (1, 2)
        ]
        frontend.send(link_pb2.FrontendMessage(submissions=submissions))
        frontend.metrics()  # By now the submissions have arrived.
        bodies: list[str | None] = []
        while "plan" not in bodies:
            if not bodies or bodies[-1] == "unknown":
                worker.hello()
            message = plan_pb2.SchedulerMessage.FromString(worker.receive())
            bodies.append(message.WhichOneof("body"))
        assert [body for body in bodies if body != "ping"] == ["welcome", "unknown"] * 2 + ["welcome", "plan"]
        assert len(message.plan.admissions) == 1
        captured = capsys.readouterr()
        assert re.search(r"plan 1: \d+ bytes .*: request r[12] has", captured.out + captured.err)
    finally:
        frontend.close()
        worker.close()
        service.stop()
        thread.join()
        service.close()
        telemetry.shutdown()
        context.destroy(linger=0)


def test_a_long_frame_takes_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If reading takes too long, the loop makes plans before it handles the rest of a frame, in the same order."""
    config = SchedulerConfig(frontend_address=f"ipc://{tmp_path}/f", worker_address=f"ipc://{tmp_path}/w")
    telemetry = Telemetry("test")
    scheduler = SchedulerService(config, telemetry, 1 << 40)
    turn, live = scheduler._turn, []

    def counted() -> bool:
        more = turn()
        live.append([request.request_id for request in scheduler._core.requests(9)])
        return more

    monkeypatch.setattr(service_module, "RECEIVING_S", 1e-9)
    monkeypatch.setattr(scheduler, "_turn", counted)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend = FrontendPeer(context, config.frontend_address, "f/1", LINK_MAX_MESSAGE)
    try:
        frontend.hello()
        submissions = [
            link_pb2.Submission(
                stream=stream,
                request_id=f"r{stream}",
                token_ids=to_column([1, 2, 3]),
                num_prompt_tokens=3,
                max_tokens=2,
                credit=99,
            )
            for stream in (1, 2, 3)
        ]
        frontend.send(link_pb2.FrontendMessage(submissions=submissions, snapshot_request=7))
        assert frontend.until("snapshot").snapshot.request == 7
        after_turns = [ids for number, ids in enumerate(live) if ids and ids not in live[:number]]
        assert after_turns == [["r1"], ["r1", "r2"], ["r1", "r2", "r3"]]
    finally:
        frontend.close()
        scheduler.stop()
        thread.join()
        scheduler.close()
        telemetry.shutdown()
        context.destroy(linger=0)
