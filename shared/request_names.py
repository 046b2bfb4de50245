"""The ids that clients have of their requests: with the prefix of an API, or without the number of a part."""

import re
from collections.abc import Iterable

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Prefixes of a request's id in the answers of the HTTP APIs."""
_PART = re.compile(r"-\d+(-other)?")
"""Suffix of one prompt of a completion, or of one pair of a score."""


def without_prefix(name: str) -> str:
    """Return an id as an answer has it without the prefix of its API."""
    for prefix in _ANSWER_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def may_mean(name: str, request_id: str) -> bool:
    """Return whether an id that a client has may be that of a request; see `meant`."""
    own = without_prefix(name)
    return request_id in (name, own) or (
        request_id.startswith((name, own)) and any(_PART.fullmatch(request_id[len(each) :]) for each in (name, own))
    )


def meant(name: str, request_ids: Iterable[str]) -> set[str]:
    """Return the ids of the requests that an id means that an answer, a header or a client has.

    It is the id itself. If no request has it, it is the id of an answer, with the prefix of its API. Without such a
    request either, it means the parts of one call: the prompts of a completion, or the pairs of a score.
    """
    known, own = set(request_ids), without_prefix(name)
    for each in (name, own):
        if each in known:
            return {each}
    return {each for each in known if may_mean(name, each)}
