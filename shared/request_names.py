"""Maps client ids to request ids: removes an API's prefix or a part's number."""

import re
from collections.abc import Iterable

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Prefixes for request ids in HTTP responses."""
_PART = re.compile(r"-\d+(-other)?")
"""Suffix of the id for one prompt of a completion, or for one pair of a score."""


def without_prefix(name: str) -> str:
    """Return an id from a response without the prefix of the API."""
    for prefix in _ANSWER_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def may_mean(name: str, request_id: str) -> bool:
    """Return whether `name` may identify the request with id `request_id`; see `meant`."""
    own = without_prefix(name)
    return request_id in (name, own) or (
        request_id.startswith((name, own)) and any(_PART.fullmatch(request_id[len(each) :]) for each in (name, own))
    )


def meant(name: str, request_ids: Iterable[str]) -> set[str]:
    """Return the ids of the requests that an id from a response, a header or a client identifies.

    If a request has exactly this id, it is meant. Otherwise the id may have the prefix of an API. If there is no such
    request either, the id means all parts of a call: the prompts of a completion, or the pairs of a score.
    """
    known, own = set(request_ids), without_prefix(name)
    for each in (name, own):
        if each in known:
            return {each}
    return {each for each in known if may_mean(name, each)}
