"""For any client input, the result is a valid request or a named error."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import generation_pb2 as v1
from services.requests.validation import ValidRequest, validate
from shared.errors import InvalidRequestError, ModelNotFoundError, UnsupportedFieldError
from tests.services.stack import MODEL, PLAIN

UINT32 = st.integers(0, 3) | st.integers(0, 2**32 - 1)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: st.text(max_size=6) | st.sampled_from(["", "echo", "x" * 300, "a\nb", "\0"]),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=6),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: UINT32,
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 9),
}


def fill(message: Message, data: st.DataObject, *, some: bool = False) -> None:
    """Set any fields in a message, recursively, to any value that the wire format permits.

    With `some`, at least one.
    """
    fields = message.DESCRIPTOR.fields_by_name
    names = sorted(fields)
    for name in data.draw(st.lists(st.sampled_from(names), min_size=int(some), max_size=4, unique=True)):
        field = fields[name]
        here = getattr(message, name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
            if value.message_type is None:
                here.update(data.draw(st.dictionaries(SCALARS[key.type], SCALARS[value.type], max_size=3)))
            else:
                for each in data.draw(st.lists(SCALARS[key.type], max_size=2, unique=True)):
                    fill(here[each], data)
        elif field.is_repeated and entry is not None:
            for _ in range(data.draw(st.integers(0, 2))):
                fill(here.add(), data)
        elif field.is_repeated:
            here.extend(data.draw(st.lists(SCALARS[field.type], max_size=20)))
        elif entry is not None:
            here.SetInParent()
            fill(here, data)
        else:
            setattr(message, name, data.draw(SCALARS[field.type]))


@given(data=st.data(), has_chat_template=st.booleans())
def test_any_request_is_valid_or_refused_by_name(data: st.DataObject, has_chat_template: bool) -> None:
    """Any request is valid, or refused with the field and the reason of every violation.

    A valid request is within the bounds on which the core and the worker rely.
    """
    request = v1.GenerateRequest()
    if data.draw(st.booleans()):
        # Requests that differ from a valid one in one field get further than requests with all fields random.
        request.token_ids.ids.extend([1, 2, 3])
    fill(request, data, some=True)
    match _outcome(request, has_chat_template):
        case ValidRequest() as valid:
            _assert_within_bounds(valid)
        case InvalidRequestError(violations=violations):
            assert violations
            assert all(violation.field and violation.description for violation in violations)
        case UnsupportedFieldError(field=field):
            assert field
        case ModelNotFoundError():
            assert request.model != MODEL.name


def _outcome(
    request: v1.GenerateRequest, has_chat_template: bool
) -> ValidRequest | InvalidRequestError | UnsupportedFieldError | ModelNotFoundError:
    try:
        return validate(request, MODEL, PLAIN, has_chat_template=has_chat_template)
    except (InvalidRequestError, UnsupportedFieldError, ModelNotFoundError) as error:
        return error


def _assert_within_bounds(valid: ValidRequest) -> None:
    sampling = valid.sampling
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert sampling.top_k < 2**31
    assert valid.max_tokens is None or 1 <= valid.max_tokens < MODEL.max_model_len
    assert all(0 <= token < MODEL.vocab_size for token in valid.stop_token_ids)
    assert all(valid.output.stop_strings)
    assert 0 < len(valid.request_id) <= 128
    assert valid.request_id.isprintable()
