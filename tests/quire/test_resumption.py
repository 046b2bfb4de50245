"""When the client retries, with what request, and when it stops."""

from quire import errors
from quire._resume import GIVE_UP_S, Resumption, make_resumable
from quire.v1 import generation_pb2 as pb

BROKEN = errors.UnavailableError("broken", code="UNAVAILABLE")
UNKNOWN = errors.RequestNotFoundError("unknown", code="NOT_FOUND")
TAKEN = errors.DuplicateRequestError("taken", code="ALREADY_EXISTS")


def resumption() -> Resumption:
    """Return the resumption of a request that the caller gave no id."""
    request = pb.GenerateRequest(text="hi")
    make_resumable(request)
    assert request.request_id
    assert request.resumable
    return Resumption(request)


def delta(choice: int, first: int, tokens: int, text: str) -> pb.GenerateResponse:
    """A delta."""
    return pb.GenerateResponse(delta=pb.Delta(choice=choice, first_index=first, token_ids=range(tokens), text=text))


def test_it_asks_for_what_is_missing() -> None:
    """Tokens and bytes of text are counted per choice."""
    state = resumption()
    for response in (delta(0, 0, 2, "añ"), delta(2, 0, 5, "x"), delta(0, 2, 1, "b")):
        state.received(response)

    assert state.failed(BROKEN, 0.0) is not None
    request = state.resume_request()
    assert list(request.from_tokens) == [3, 0, 5]
    assert list(request.from_text_bytes) == [4, 0, 1]
    assert not state.sends_again


def test_only_a_request_that_never_arrived_is_sent_again() -> None:
    """A request is sent again only if it never arrived.

    Unknown to the server and nothing received: send it. The id is taken: the request has arrived. Unknown to the server
    after a message: it is over.
    """
    state = resumption()
    assert state.failed(BROKEN, 0.0) is not None
    assert state.failed(UNKNOWN, 0.1) is not None
    assert state.sends_again
    assert state.failed(TAKEN, 0.2) is not None
    assert not state.sends_again
    state.received(delta(0, 0, 1, "a"))
    assert state.failed(UNKNOWN, 0.3) is None
    assert resumption().failed(TAKEN, 0.0) is None


def test_waits_grow_and_end() -> None:
    """Each wait is twice the previous one, up to a bound; a message resets it, and other errors are final.

    The total time is bounded.
    """
    state = resumption()
    waits = [state.failed(BROKEN, float(second)) for second in range(10)]
    assert waits[:4] == [0.05, 0.1, 0.2, 0.4]
    assert waits[-1] == 2.0
    state.received(delta(0, 0, 1, "a"))
    assert state.failed(BROKEN, 100.0) == 0.05
    assert state.failed(BROKEN, 100.0 + GIVE_UP_S + 1) is None
    assert resumption().failed(errors.InvalidRequestError("no", code="INVALID_ARGUMENT"), 0.0) is None
