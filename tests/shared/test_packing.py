"""What is put together into messages fits into frames, comes out complete and in order."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.quire.link.v1 import link_pb2
from shared.frames import LINK_MAX_MESSAGE, MAX_PART_BYTES, PACKED_BYTES, FrameTooLargeError
from shared.packing import Packer, fitting, in_parts

SIZES = st.lists(st.sampled_from([1, 1000, PACKED_BYTES - 1, PACKED_BYTES, PACKED_BYTES + 1, MAX_PART_BYTES]))


@given(SIZES)
def test_messages_hold_as_much_as_they_may_and_nothing_more(sizes: list[int]) -> None:
    """Parts are in order, together while they are small, and alone when they are large."""
    packer = Packer(link_pb2.CoreMessage)
    for number, size in enumerate(sizes):
        packer.message_for(size, "part").ends.add(stream=number, retry_ms=size)
    messages = [[end.retry_ms for end in message.ends] for message in packer.messages]

    assert list(itertools.chain.from_iterable(messages)) == sizes
    assert all(sum(message) <= PACKED_BYTES or len(message) == 1 for message in messages)
    assert all(sum(before) + after[0] > PACKED_BYTES for before, after in itertools.pairwise(messages))


def test_a_part_that_no_frame_takes_is_refused_by_name() -> None:
    """The error names the part and its size."""
    with pytest.raises(FrameTooLargeError, match=f"the log of request r7: {MAX_PART_BYTES + 1} bytes"):
        Packer(link_pb2.CoreMessage).message_for(MAX_PART_BYTES + 1, "the log of request r7")


@given(st.integers(0, 5 * PACKED_BYTES // 8))
def test_columns_are_cut_so_that_no_two_parts_share_a_message(count: int) -> None:
    """A column is a field that a message has once: all parts but the last fill theirs, so each gets a message."""
    packer = Packer(link_pb2.CoreMessage)
    parts = list(in_parts(range(count), 8))
    messages = [packer.message_for(8 * len(part), "column") for part in parts]
    assert [value for part in parts for value in part] == list(range(count))
    assert len({id(message) for message in messages}) == len(parts)


def test_of_a_long_list_the_beginning_is_kept() -> None:
    """A list that answers a query in one part is truncated at the end of the part."""
    family = link_pb2.MetricFamily(help="x" * (1 << 20))
    kept = list(fitting([family] * 20))
    assert len(kept) == 11
    assert link_pb2.CoreMessage(snapshot=link_pb2.Snapshot(families=kept)).ByteSize() <= MAX_PART_BYTES
    assert LINK_MAX_MESSAGE - MAX_PART_BYTES == PACKED_BYTES
