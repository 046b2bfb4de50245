"""Promises of the frames between processes: their sizes, and that nonsense is refused and never fatal."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.frontend import link as frontend_link
from scheduler_svc.frontend.link import Outgoing
from scheduler_svc.worker import link as worker_link
from services.link.incoming import tokens_by_stream
from shared.columns import from_column, to_column
from shared.frames import PLAN_VERSIONS, MalformedFrameError
from shared.request_spec import Pooling, RequestSpec
from shared.versions import UnsupportedVersionError
from tests.examples import examples

_NONE = np.zeros(0, np.intp)


def _plan(*, admissions: tuple[RowAdmission, ...] = (), num_decodes: int = 256) -> Plan:
    return Plan(
        worker=b"w",
        epoch=(1 << 63) + 5,
        step=1_000_000,
        leaves=_NONE,
        admissions=admissions,
        append_rows=_NONE,
        append_blocks=_NONE,
        chunk_rows=_NONE,
        chunk_lengths=_NONE,
        holds=_NONE,
        releases=_NONE,
        num_decodes=num_decodes,
        num_tokens=num_decodes,
        traced_rows=(),
    )


def _encode(plan: Plan) -> bytes:
    return worker_link.encode_plan(plan, step_traceparent="", attempt_traceparents={})


def test_steady_decode_plan_is_a_few_bytes() -> None:
    """A step in which 256 rows only go on decoding costs at most 20 bytes on the wire."""
    assert len(_encode(_plan())) <= 20


def test_decode_answer_is_two_columns() -> None:
    """The answer to 256 decoding rows costs eight bytes a row and at most 80 more."""
    rows = to_column(np.arange(256))
    timings = plan_pb2.StepTimings(
        received_unix_ns=1 << 60, started_unix_ns=1 << 60, prepare_ns=1 << 20, forward_ns=1 << 30, sample_ns=1 << 20
    )
    result = plan_pb2.StepResult(step=1_000_000, rows=rows, tokens=rows, timings=timings)
    frame = plan_pb2.WorkerMessage(epoch=1 << 63, result=result).SerializeToString()
    assert len(frame) <= 256 * 8 + 80


def test_admission_costs_its_tokens_and_blocks() -> None:
    """An admission costs four bytes a token, four bytes a block and at most 96 more."""
    admission = RowAdmission(
        row=255,
        generation=1000,
        spec=RequestSpec(
            request_id="req-0123456789abcdef01234567",
            num_prompt_tokens=2048,
            max_tokens=64,
            sampling=plan_pb2.SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=1 << 60).SerializeToString(),
        ),
        token_ids=np.arange(2048, dtype=np.int32),
        num_computed_tokens=0,
        blocks=np.arange(128, dtype=np.int32),
        frontend=b"f",
        stream=7,
        attempt=0,
        queued_since=0.0,
    )
    size = len(_encode(_plan(admissions=(admission,)))) - len(_encode(_plan()))
    assert size <= 4 * 2048 + 4 * 128 + 96


def test_tokens_for_a_front_end_are_columns() -> None:
    """One step's tokens for 256 streams cost twelve bytes a stream and at most 40 more."""
    column = np.arange(256, dtype=np.int32)
    outgoing = Outgoing()
    outgoing.add_tokens(ef.TokensReady(frontend=b"f", streams=column, first_indices=column, tokens=column))
    (frame,) = outgoing.encode(1 << 63)
    assert len(frame) <= 256 * 12 + 40
    message = link_pb2.CoreMessage.FromString(frame)
    assert from_column(message.tokens).tolist() == column.tolist()


@pytest.mark.parametrize("num_streams", [3, 400_000], ids=["one frame", "several frames"])
def test_several_tokens_of_a_stream_reach_the_front_end_in_order(num_streams: int) -> None:
    """Tokens of steps with and without drafts arrive at the front end with the right stream and index."""
    streams = np.arange(num_streams, dtype=np.int32)
    counts = 1 + streams % 3
    tokens = np.arange(int(counts.sum()), dtype=np.int32)
    outgoing = Outgoing()
    outgoing.add_tokens(ef.TokensReady(frontend=b"f", streams=streams, first_indices=streams, tokens=streams))
    outgoing.add_tokens(
        ef.TokensReady(frontend=b"f", streams=streams, first_indices=streams + 1, tokens=tokens, counts=counts)
    )
    received: dict[int, list[int]] = {}
    frames = outgoing.encode(1)
    assert (len(frames) > 1) == (num_streams > 3)
    for frame in frames:
        for stream, index, part in tokens_by_stream(link_pb2.CoreMessage.FromString(frame)):
            known = received.setdefault(stream, [])
            assert index == stream + len(known)
            known += part
    ends = counts.cumsum()
    for stream in (0, 1, 2, num_streams - 1):
        assert received[stream] == [stream, *range(ends[stream] - counts[stream], ends[stream])]


def test_counts_and_drafts_of_an_answer_are_decoded() -> None:
    """A result with several tokens per row has its counts and its drafts; the columns have the rows' length."""
    result = plan_pb2.StepResult(step=1, rows=to_column([2, 5]), tokens=to_column([7, 8, 9]))
    result.counts, result.draft_counts = to_column([1, 2]), to_column([0, 3])
    event, _ = worker_link.decode(b"w", plan_pb2.WorkerMessage(epoch=1, result=result).SerializeToString())
    assert isinstance(event, ev.StepDone)
    assert event.counts is not None
    assert event.draft_counts is not None
    assert (event.counts.tolist(), event.draft_counts.tolist()) == ([1, 2], [0, 3])
    result.draft_counts = to_column([1])
    with pytest.raises(MalformedFrameError):
        worker_link.decode(b"w", plan_pb2.WorkerMessage(epoch=1, result=result).SerializeToString())


def test_the_field_of_an_invalid_end_is_on_the_wire() -> None:
    """A front end learns which field of the request is wrong."""
    end = ef.RequestEnded(frontend=b"f", stream=1, request_id="r", reason=ef.EndReason.INVALID, field="grammar")
    assert frontend_link.to_stream_end(end).field == "grammar"


def test_the_drafts_of_a_request_are_on_the_wire() -> None:
    """A front end learns how many drafts were verified and accepted, and a journal keeps them."""
    end = ef.RequestEnded(
        frontend=b"f", stream=1, request_id="r", reason=ef.EndReason.STOP, draft_tokens=7, accepted_draft_tokens=5
    )
    message = frontend_link.to_stream_end(end)
    assert (message.draft_tokens, message.accepted_draft_tokens) == (7, 5)
    assert frontend_link.from_stream_end(message, b"f", RequestSpec("r", 1, 1)) == end


def test_every_end_reason_is_on_the_wire() -> None:
    """Each reason of the core has its value in the link protocol, and the other way round."""
    names = link_pb2.EndReason.DESCRIPTOR.values_by_name
    on_the_wire = {name.removeprefix("END_REASON_") for name in names} - {"UNSPECIFIED"}
    assert on_the_wire == {reason.name for reason in ef.EndReason}


def test_every_kind_of_failure_is_on_the_wire() -> None:
    """Each failure kind in the plan protocol maps to the core's kind with the same name.

    An unknown or missing kind, as from a worker of the release before, maps to the kind that needs most care.
    """
    names = plan_pb2.RowFailureKind.DESCRIPTOR.values_by_name
    kinds = {value.number: name.removeprefix("ROW_FAILURE_KIND_") for name, value in names.items()}
    kinds[plan_pb2.ROW_FAILURE_KIND_UNSPECIFIED] = kinds[99] = "NOT_FINITE"
    result = plan_pb2.StepResult(step=1)
    for number in kinds:
        result.failures.add(row=number, generation=3, reason="why", field="f" * 1000).MergeFromString(
            b"\x20" + bytes([number])
        )
    event, _ = worker_link.decode(b"w", plan_pb2.WorkerMessage(epoch=1, result=result).SerializeToString())

    assert isinstance(event, ev.StepDone)
    assert {failure.row: failure.kind.name for failure in event.failures} == kinds
    assert {kind.name for kind in ev.FailureKind} == set(kinds.values())
    assert all(len(failure.field) <= 128 for failure in event.failures)


@pytest.mark.parametrize(
    "result",
    [
        plan_pb2.StepResult(step=1, rows=b"\0\0\0", tokens=b"\0\0\0"),
        plan_pb2.StepResult(step=1, rows=to_column([1, 2]), tokens=to_column([1])),
        plan_pb2.StepResult(step=1, rows=to_column([1]), tokens=to_column([1]), counts=to_column([2])),
    ],
    ids=["ragged", "unequal", "counts"],
)
def test_ill_formed_columns_are_malformed(result: plan_pb2.StepResult) -> None:
    """Columns that are ragged, unequal or not planned are refused as malformed."""
    with pytest.raises(MalformedFrameError):
        worker_link.decode(b"w", plan_pb2.WorkerMessage(epoch=1, result=result).SerializeToString())


def test_a_specification_crosses_the_link_unchanged() -> None:
    """Every field in a request's specification arrives with its value, and returns with the request's log."""
    spec = RequestSpec(
        request_id="r", num_prompt_tokens=1, max_tokens=1, stop_token_ids=to_column([5]), sampling=b"s", grammar=b"",
        pooling=Pooling.MEAN, computes_whole_prompt=True, tenant="t", request_class="c", priority=-3,
        expected_output_tokens=4, cache_scope=b"x", model="m", identity=b"i", resume_info=b"f", traceparent="p",
        session=b"y", ends_session=True, retention_s=60.0, retention_priority=2, expected_pause_s=1.5,
    )  # fmt: skip
    unset = {field for field, value in zip(spec._fields, spec, strict=True) if not value}
    submission = frontend_link.to_submission(spec, to_column([1]))

    assert frontend_link.arrival(b"f", submission, 0.0).spec == spec
    assert unset == {"grammar"}, "give every field a value that is not its default"


GOOD = link_pb2.Submission(
    stream=1, request_id="good", token_ids=to_column([1, 2, 3, 4]), num_prompt_tokens=4, max_tokens=2, credit=64
)
UNUSABLE = {
    "stream": link_pb2.Submission(stream=1 << 31),
    "tokens": link_pb2.Submission(token_ids=b"\1\0\0"),
    "stops": link_pb2.Submission(stop_token_ids=b"\1\0\0"),
    "pooling": link_pb2.Submission(pooling=3, max_tokens=1),
    "pooling that generates": link_pb2.Submission(pooling=1),
    "longer prompt": link_pb2.Submission(num_prompt_tokens=5),
    "retention without end": link_pb2.Submission(retention_s=math.inf),
    "negative retention": link_pb2.Submission(retention_s=-1.0),
    "retention priority": link_pb2.Submission(retention_s=1.0, retention_priority=10),
    "expected pause": link_pb2.Submission(expected_pause_s=math.nan),
    "half a key": link_pb2.Submission(block_keys=bytes(31), block_size=1),
    "keys without size": link_pb2.Submission(block_keys=bytes(32)),
    "more keys than blocks": link_pb2.Submission(block_keys=bytes(64), block_size=4),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_submission_ends_invalid_and_alone(name: str) -> None:
    """A submission that no request can represent ends with reason INVALID, and the frame's other requests arrive."""
    wrong = link_pb2.Submission()
    wrong.CopyFrom(GOOD)
    wrong.stream, wrong.request_id = 7, "wrong"
    wrong.MergeFrom(UNUSABLE[name])
    frame = link_pb2.FrontendMessage(submissions=[GOOD, wrong]).SerializeToString()

    incoming = frontend_link.decode(b"f", frame, 0.0)

    assert [event.spec.request_id for event in incoming.events if isinstance(event, ev.RequestArrived)] == ["good"]
    assert [(end.request_id, end.stream, end.reason) for end in incoming.refused] == [
        ("wrong", wrong.stream, ef.EndReason.INVALID)
    ]


def _hello(**changes: int) -> bytes:
    hello = plan_pb2.Hello(
        protocol_version=PLAN_VERSIONS.newest, worker_id="w", block_size=16, num_blocks=64, max_rows=4,
        max_tokens_per_step=64, num_kv_groups=1,
    )  # fmt: skip
    hello.model.vocab_size, hello.model.max_model_len = 100, 1024
    for name, value in changes.items():
        setattr(hello if hasattr(hello, name) else hello.model, name, value)
    return plan_pb2.WorkerMessage(hello=hello).SerializeToString()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_rows": 1 << 17},
        {"num_blocks": 1 << 26},
        {"num_blocks": 1 << 21, "num_kv_groups": 32, "window": 64, "window_chunk": 64},
        {"block_size": 1 << 31},
        {"vocab_size": (1 << 32) - 1},
        {"max_model_len": (1 << 32) - 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_worker_with_impossible_values_is_malformed(changes: dict[str, int]) -> None:
    """Numbers that no worker has, and for which there would be no memory, are refused at the door."""
    assert isinstance(worker_link.decode(b"w", _hello())[0], ev.WorkerHello)
    with pytest.raises(MalformedFrameError):
        worker_link.decode(b"w", _hello(**changes))


def test_block_tables_without_end_are_refused_with_the_remedy() -> None:
    """Rows and lengths that are each possible, but whose block tables would not fit together, are refused by name."""
    with pytest.raises(UnsupportedVersionError, match="max_num_seqs"):
        worker_link.decode(b"w", _hello(max_rows=1 << 16, num_blocks=1 << 22, max_model_len=1 << 29))


def test_kinds_of_cache_are_bounded() -> None:
    """The kinds that a worker reports are only displayed; too many or too long ones are cut."""
    event = worker_link.decode(b"w", _hello())[0]
    assert isinstance(event, ev.WorkerHello)
    assert event.cache_kinds == ()
    hello = plan_pb2.WorkerMessage.FromString(_hello())
    hello.hello.cache_kinds.extend(["full", "x" * 99, *"abcdefgh"])
    event = worker_link.decode(b"w", hello.SerializeToString())[0]
    assert isinstance(event, ev.WorkerHello)
    assert event.cache_kinds == ("full", "x" * 16, *"abcdef")


@settings(max_examples=examples(500), deadline=None)
@given(payload=st.binary(max_size=200))
def test_random_frames_are_refused_or_events(payload: bytes) -> None:
    """Any bytes at all are an event or a malformed frame, from workers and from front ends."""
    try:
        event, _ = worker_link.decode(b"w", payload)
        assert type(event) in (ev.WorkerHello, ev.StepDone, ev.WorkerCompiling, ev.GrammarReported, ev.WorkerLost)
    except (MalformedFrameError, UnsupportedVersionError):
        pass
    with contextlib.suppress(MalformedFrameError, UnsupportedVersionError):
        assert isinstance(frontend_link.decode(b"f", payload, 0.0), frontend_link.Incoming)
