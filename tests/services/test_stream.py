"""One stream without any I/O: order, duplicates, gaps, stop strings, credit, and the outbox that merges."""

from hypothesis import given
from hypothesis import strategies as st

from protos.quire.link.v1 import link_pb2
from services.requests.output import OutputRules
from services.requests.scheduling import DueTimes
from services.streams.outbox import Batch, Outbox
from services.streams.stream import Received, Stream, StreamRequest
from services.text.detokenizer import detokenizer_factory
from shared.columns import from_column, to_column
from shared.errors import NoWorkerError
from shared.request_spec import RequestSpec
from tests.services.tokenizers_for_tests import byte_level

LENGTH = link_pb2.StreamEnd(reason=link_pb2.END_REASON_LENGTH)


def make_stream(*stops: str, credit: int = 4096, prompt: tuple[int, ...] = (7, 8)) -> Stream:
    """A stream of the byte-level tokenizer."""
    request = StreamRequest(
        spec=RequestSpec(request_id="r", num_prompt_tokens=len(prompt), max_tokens=1000),
        prompt=to_column(prompt),
        output=OutputRules(stop_strings=stops),
        credit=credit,
        arrival=0.0,
    )
    return Stream(request, detokenizer_factory(byte_level())(True), lambda: None)


def encode(text: str) -> list[int]:
    """Token ids, one letter's token at a time."""
    tokenizer = byte_level()
    return [token_id for letter in text for token_id in tokenizer.encode(letter, add_special_tokens=False).ids]


def drain(stream: Stream) -> list[Batch]:
    """Everything the stream has."""
    batches = []
    while (batch := stream.take()) is not None:
        batches.append(batch)
        stream.taken()
    return batches


def text_and_ids(batches: list[Batch]) -> tuple[str, list[int]]:
    """All of several batches, whose indices must follow each other."""
    ids: list[int] = []
    for batch in batches:
        assert batch.first_index == len(ids)
        ids += batch.token_ids
    return "".join(batch.text for batch in batches), ids


def test_outbox_merges_what_was_not_taken() -> None:
    """Accumulated tokens are sent as one batch with the first token's index."""
    outbox = Outbox()
    batches = []
    for tokens, text in (([1], "a"), ([2, 3, 4], "bc"), ([], "d"), ([], "")):
        outbox.tokens.extend(tokens)
        outbox.released += len(tokens)
        outbox.text += text
        batches.append(outbox.take())

    assert batches == [Batch(0, [1], "a"), Batch(1, [2, 3, 4], "bc"), Batch(4, [], "d"), None]
    assert outbox.merged == 2


def test_a_prompt_reader_gets_every_token_in_a_batch_of_its_own() -> None:
    """Without lag nothing is merged."""
    stream = make_stream()
    batches = []
    for index, token_id in enumerate(encode("hello")):
        assert stream.receive(index, [token_id]) is Received.TAKEN
        batches += drain(stream)

    assert [batch.text for batch in batches] == list("hello")
    assert stream.merged_tokens == 0


def test_tokens_that_are_known_are_ignored() -> None:
    """After a core was lost, tokens that come a second time change nothing, even half of a batch."""
    stream = make_stream()
    a, b, c, d = encode("abcd")
    stream.receive(0, [a, b])
    stream.receive(0, [a, b])
    stream.receive(1, [b, c, d])

    assert text_and_ids(drain(stream)) == ("abcd", [a, b, c, d])


def test_a_gap_is_noticed() -> None:
    """Tokens beyond the next index are not taken."""
    stream = make_stream()
    stream.receive(0, encode("a"))

    assert stream.receive(2, encode("c")) is Received.GAP
    assert stream.num_generated == 1


def test_a_submission_after_a_loss_holds_what_was_generated() -> None:
    """Prompt and generated tokens go to the new core; the prompt's length stays."""
    stream = make_stream(prompt=(7, 8, 9))
    stream.receive(0, [40, 41])
    drain(stream)

    submission = stream.submission(0.0)

    assert from_column(submission.token_ids).tolist() == [7, 8, 9, 40, 41]
    assert submission.num_prompt_tokens == 3
    assert submission.credit == 4096


def test_a_submission_after_a_loss_leaves_room_for_what_still_waits() -> None:
    """Credit starts afresh, less the tokens that the reader has not taken."""
    stream = make_stream(credit=40)
    stream.receive(0, encode("abc"))

    assert stream.submission(0.0).credit == 40 - 3 * 4


def test_the_time_left_to_the_deadline_shrinks() -> None:
    """A later submission leaves the core less time."""
    spec = RequestSpec(request_id="r", num_prompt_tokens=1, max_tokens=1)
    request = StreamRequest(spec=spec, prompt=to_column([1]), credit=40, arrival=0.0, due=DueTimes(deadline=100.0))
    stream = Stream(request, detokenizer_factory(byte_level())(True), lambda: None)

    assert stream.submission(90.0).deadline_ns == 10_000_000_000
    assert stream.submission(200.0).deadline_ns == 1


def test_credit_returns_when_the_reader_took_the_tokens() -> None:
    """Waiting text and text being written return nothing; a portion is a quarter of the credit."""
    stream = make_stream(credit=32)
    stream.receive(0, encode("abcd"))
    waiting = stream.credit_due()
    stream.take()
    writing = stream.credit_due()
    stream.taken()

    assert (waiting, writing) == (0, 0)
    assert stream.credit_due() == 16
    assert stream.credit_due() == 0


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=60),
    st.sampled_from([(), ("zz",), ("ab",)]),
    st.integers(1, 20),
)
def test_tokens_held_never_exceed_the_credit(
    steps: list[tuple[int, bool]], stops: tuple[str, ...], tokens: int
) -> None:
    """A core that respects credit never stalls for good, and never has more than the credit outstanding."""
    stream = make_stream(*stops, credit=4 * tokens)
    credit, sent, letter = 4 * tokens, 0, encode("a")[0]
    for count, reads in steps:
        count = min(count, credit // 4)
        credit -= 4 * count
        stream.receive(sent, [letter] * count)
        sent += count
        if reads:
            drain(stream)
        credit += stream.credit_due()
        assert credit <= 4 * tokens
    drain(stream)
    credit += stream.credit_due()

    assert credit >= 4


def test_a_stop_string_over_several_tokens_is_cut_out() -> None:
    """The text ends before the match, tokens of the match are not sent, and the core learns how many count."""
    stream = make_stream("lo w")
    ids = encode("hello world")
    outcomes = [stream.receive(index, [token_id]) for index, token_id in enumerate(ids[:7])]
    stream.finish(link_pb2.StreamEnd(reason=link_pb2.END_REASON_STOP_STRING))

    assert outcomes == [Received.TAKEN] * 6 + [Received.MATCHED]
    assert stream.keep_tokens == 3
    assert stream.stop_string == "lo w"
    assert text_and_ids(drain(stream)) == ("hel", ids[:3])


def test_tokens_after_a_match_are_discarded() -> None:
    """What the core sampled before it heard of the match changes nothing."""
    stream = make_stream("b")
    ids = encode("abcd")
    stream.receive(0, ids[:3])
    stream.receive(3, ids[3:])
    stream.finish(LENGTH)

    assert text_and_ids(drain(stream)) == ("a", ids[:1])
    assert stream.keep_tokens == 1


def test_a_partial_stop_string_is_released_at_the_end() -> None:
    """A held-back prefix of a stop string is released, with its tokens, when the stream ends."""
    stream = make_stream("lost")
    ids = encode("hello")
    stream.receive(0, ids)
    before = text_and_ids(drain(stream))
    stream.finish(LENGTH)
    after = drain(stream)

    assert before == ("hel", ids[:3])
    assert after == [Batch(3, ids[3:], "lo")]
    assert stream.stop_string is None


def test_a_stop_string_may_be_completed_by_the_last_character() -> None:
    """Bytes that were incomplete until the end are searched too."""
    stream = make_stream("\ufffd")
    lead = byte_level().token_to_id("æ")
    assert lead is not None
    stream.receive(0, [*encode("a"), lead])
    stream.finish(LENGTH)

    assert text_and_ids(drain(stream)) == ("a", encode("a"))
    assert stream.stop_string == "\ufffd"


@given(text=st.text("ab🙂", max_size=20), sizes=st.lists(st.integers(1, 4), max_size=20), stops=st.booleans())
def test_ids_and_text_are_complete_however_they_arrive(text: str, sizes: list[int], stops: bool) -> None:
    """Without a match every token and every character comes out exactly once, in order."""
    stream = make_stream(*(("aaaaaaaaaaaaaaaaaaaaaab", "bbbbbbbbbbbbbbbbbbbbbbbba") if stops else ()))
    ids = encode(text)
    position, batches, chunk = 0, [], iter(sizes)
    while position < len(ids):
        size = next(chunk, 1)
        stream.receive(position, ids[position : position + size])
        position += size
        if size % 2:
            batches += drain(stream)
    stream.finish(LENGTH)
    batches += drain(stream)

    assert text_and_ids(batches) == (text, ids)


def test_a_stream_ends_once() -> None:
    """The first end counts; later ones are ignored."""
    stream = make_stream()
    stream.finish(LENGTH)
    stream.fail(NoWorkerError("late"))
    stream.finish(link_pb2.StreamEnd(reason=link_pb2.END_REASON_STOP))

    assert stream.end == LENGTH
    assert stream.error is None
