"""Requests as the core holds them, for tests of what ranks, counts and forecasts them."""

import numpy as np

from scheduler_svc.core.requests.request import Request, RequestKey, to_tokens


def make_request(
    sequence: int = 1, *, prompt: int = 10, generated: int = 0, max_tokens: int = 50, **changes: object
) -> Request:
    """The `sequence`-th request to arrive, at that second, with so many tokens; any other field can be given."""
    values: dict[str, object] = {
        "key": RequestKey(b"f", sequence),
        "request_id": f"r{sequence}",
        "tokens": to_tokens(np.ones(prompt + generated, np.int32)),
        "num_prompt_tokens": prompt,
        "limit": prompt + max_tokens,
        "stop_token_ids": (),
        "sampling": b"",
        "allowed": 1000,
        "deadline": None,
        "traceparent": "",
        "arrival": float(sequence),
        "sequence": sequence,
    }
    return Request(**(values | changes))  # type: ignore[arg-type]
