"""Requests as they arrive and as the core holds them, for tests; any field of them or of their `spec` can be passed."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.requests.request import Request, RequestKey, to_tokens
from shared.columns import from_column, to_column
from shared.request_spec import RequestSpec


def split_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that belong to the specification, and the others."""
    own = RequestSpec._fields
    return {k: v for k, v in fields.items() if k in own}, {k: v for k, v in fields.items() if k not in own}


def make_request(
    sequence: int = 1, *, prompt: int = 10, generated: int = 0, max_tokens: int = 50, **changes: Any
) -> Request:
    """The `sequence`-th request to arrive, at that second, with so many tokens."""
    of_spec, others = split_fields(changes)
    spec = RequestSpec(request_id=f"r{sequence}", num_prompt_tokens=prompt, max_tokens=max_tokens)
    values: dict[str, Any] = {
        "key": RequestKey(b"f", sequence),
        "spec": spec._replace(**of_spec),
        "tokens": to_tokens(np.ones(prompt + generated, np.int32)),
        "limit": prompt + max_tokens,
        "stop_token_ids": tuple(from_column(spec.stop_token_ids).tolist()),
        "allowed": 1000,
        "deadline": None,
        "arrival": float(sequence),
        "sequence": sequence,
    }
    return Request(**(values | others))


def make_arrival(frontend: bytes, stream: int = 1, *, tokens: int = 8, **changes: Any) -> ev.RequestArrived:
    """The arrival of a request with a prompt of so many tokens."""
    of_spec, others = split_fields(changes)
    spec = RequestSpec(request_id=f"r{stream}", num_prompt_tokens=tokens, max_tokens=5)
    values: dict[str, Any] = {
        "frontend": frontend,
        "stream": stream,
        "spec": spec._replace(**of_spec),
        "token_ids": from_column(to_column(range(tokens))),
        "credit": 1 << 20,
    }
    return ev.RequestArrived(**(values | others))
