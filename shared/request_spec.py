"""Request specification: all request properties that are constant from validation to the end.

The front end creates the specification after validating a request (`services.calls.generation` and `embeddings`), and
sends it in `quire.link.v1.Submission`. All later stages hold the same value without copying fields: the core's
`Request`, its retained log, and the admission to a row. Tokens, credit and deadlines change between submissions, so
they are not part of the specification.

The fields have the same names as in `quire.link.v1.Submission`, which documents the wire format. `sampling`, `grammar`
and `resume_info` are opaque to the scheduler: the front end encodes them once, and the worker or another front end
decodes them once.
"""

import enum
from operator import attrgetter
from typing import NamedTuple

from google.protobuf.message import Message


class Pooling(enum.IntEnum):
    """Pooling of a prompt; the numbers are those of plan.proto."""

    NONE = 0
    """The request generates tokens instead of an embedding."""
    LAST = 1
    """The embedding is the last hidden state of the last token."""
    MEAN = 2
    """The embedding is the mean of the last hidden states of all tokens."""


MAX_RETENTION_S = 86_400.0
"""Longest time for which a request can retain its KV, and longest pause that it can announce, s."""
MAX_RETENTION_PRIORITY = 9
"""Highest priority of retained KV; the lowest is 0."""


class RequestSpec(NamedTuple):
    """Fixed properties of a request. A named tuple, because a frozen dataclass takes three times as long to create."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    """Maximum total number of generated tokens, at least 1."""
    stop_token_ids: bytes = b""
    """Column of the tokens that end the request."""
    sampling: bytes = b""
    """Serialized quire.plan.v1.SamplingParams; only the worker reads it."""
    grammar: bytes = b""
    """Serialized quire.plan.v1.Grammar, which only the worker reads; empty for none."""
    pooling: int = Pooling.NONE
    """A `Pooling`. Unless it is NONE, the request generates nothing and `max_tokens` is 1."""
    computes_whole_prompt: bool = False
    """Whether its prompt must not be taken from the prefix cache."""
    tenant: str = ""
    request_class: str = ""
    priority: int = 0
    """Higher runs first."""
    expected_output_tokens: int = 0
    """The client's hint; 0 for none."""
    cache_scope: bytes = b""
    """Requests share cached prefixes only within a scope, so that users cannot probe the prompts of other users."""
    session: bytes = b""
    """Name of its session within its tenant and cache scope; empty if the session is found by content."""
    ends_session: bool = False
    """Whether it is the last turn of its session."""
    retention_s: float = 0.0
    """Time after its end for which its KV is retained, s; 0 for as long as memory permits."""
    retention_priority: int = 0
    """Retained KV with a lower priority is evicted first."""
    expected_pause_s: float = 0.0
    """The client's estimate of the time from its end to the next turn of its session, s; 0 for none."""
    model: str = ""
    """Fingerprint of the model that validated the request and must compute it; "" if unknown."""
    identity: bytes = b""
    """The request's identity, the same on every front end; empty if the request cannot be resumed."""
    resume_info: bytes = b""
    """Serialized GenerateRequest for resuming on another front end; only front ends read it."""
    traceparent: str = ""
    """W3C traceparent of the call's span; "" if it is not traced."""


_SIZED_FIELDS_OF = attrgetter(*[name for name, kind in RequestSpec.__annotations__.items() if kind in (str, bytes)])


def size_of(spec: RequestSpec) -> int:
    """Return the size of the fields that have no fixed size, in bytes and characters."""
    return sum(map(len, _SIZED_FIELDS_OF(spec)))


_FIELDS_OF = attrgetter(*RequestSpec._fields)


def read_spec(message: Message) -> RequestSpec:
    """Return the specification in the fields of a message, a `Submission`."""
    return RequestSpec._make(_FIELDS_OF(message))
