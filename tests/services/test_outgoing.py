"""Frames to the scheduler core: complete, in order, and none larger than the core takes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.quire.link.v1 import link_pb2
from services.link.outgoing import Outgoing
from shared.columns import from_column
from shared.frames import LINK_MAX_MESSAGE, MAX_PART_BYTES, PACKED_BYTES, FrameTooLargeError
from tests.examples import examples


def test_many_submissions_at_once_stay_below_the_frame_limit() -> None:
    """After a loss the tokens of all streams go out in several frames, in order."""
    outgoing = Outgoing()
    for stream in range(1, 8):
        outgoing.submit(link_pb2.Submission(stream=stream, token_ids=bytes(PACKED_BYTES // 3)))
    outgoing.cancel(99)
    messages = [link_pb2.FrontendMessage.FromString(payload) for payload in outgoing.take()]

    assert [[s.stream for s in message.submissions] for message in messages] == [[1, 2], [3, 4], [5, 6], [7]]
    assert [bool(message.cancelled) for message in messages] == [False, False, False, True]
    assert all(message.ByteSize() < PACKED_BYTES + 1024 for message in messages)
    assert outgoing.take() == []


SIZES = st.sampled_from([0, 100, 100_000, PACKED_BYTES + 100, MAX_PART_BYTES - 4096])


@settings(max_examples=examples(25), deadline=None)
@given(
    submissions=st.lists(SIZES, max_size=8),
    counts=st.lists(st.sampled_from([0, 1, 1000, 600_000]), min_size=4, max_size=4),
    num_cancels=st.sampled_from([0, 3, 2000]),
)
def test_no_frame_to_the_core_is_too_large(submissions: list[int], counts: list[int], num_cancels: int) -> None:
    """Everything for the core in one turn, in any mix, arrives complete and in order, in frames within its limit."""
    outgoing = Outgoing()
    for stream, size in enumerate(submissions, 1):
        outgoing.submit(link_pb2.Submission(stream=stream, token_ids=bytes(size)))
    num_cancelled, num_detached, num_matches, num_credits = counts
    for stream in range(num_cancelled):
        outgoing.cancel(stream)
    for stream in range(num_detached):
        outgoing.detach(stream)
    for stream in range(min(num_matches, 1000)):
        outgoing.stop_match(stream, stream + 1)
    for stream in range(num_credits):
        outgoing.credit(stream, stream + 1)
    for number in range(num_cancels):
        order = link_pb2.CancelRequests(identities=[bytes(32)] * 128)
        outgoing.operate(link_pb2.OperatorRequest(number=number, cancel_requests=order))
        outgoing.ask_resume(number, bytes(64))
    outgoing.goodbye()
    frames = outgoing.take()

    assert max(map(len, frames)) <= LINK_MAX_MESSAGE
    messages = [link_pb2.FrontendMessage.FromString(frame) for frame in frames]
    sent = [(each.stream, len(each.token_ids)) for message in messages for each in message.submissions]
    assert sent == list(enumerate(submissions, 1))

    def column(name: str) -> list[int]:
        return [value for message in messages for value in from_column(getattr(message, name)).tolist()]

    assert column("cancelled") == list(range(num_cancelled))
    assert column("detached") == list(range(num_detached))
    assert column("credit_streams") == list(range(num_credits))
    assert column("credit_bytes") == [stream + 1 for stream in range(num_credits)]
    matches = [(each.stream, each.keep_tokens) for message in messages for each in message.stop_matches]
    assert matches == [(stream, stream + 1) for stream in range(min(num_matches, 1000))]
    assert [each.number for message in messages for each in message.operator_requests] == list(range(num_cancels))
    assert [each.number for message in messages for each in message.resume_questions] == list(range(num_cancels))
    assert [message.goodbye for message in messages] == [False] * (len(messages) - 1) + [True]


def test_a_submission_that_no_frame_takes_fails_alone() -> None:
    """It is refused by its request's name on submission; the turn's other submissions are sent."""
    outgoing = Outgoing()
    outgoing.submit(link_pb2.Submission(stream=1))
    with pytest.raises(FrameTooLargeError, match="request heavy: "):
        outgoing.submit(link_pb2.Submission(stream=2, request_id="heavy", token_ids=bytes(MAX_PART_BYTES)))
    (frame,) = outgoing.take()
    assert [each.stream for each in link_pb2.FrontendMessage.FromString(frame).submissions] == [1]
