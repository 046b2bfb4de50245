"""Code for batches that both clients share: request keys, assembled answers, and a progress line."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quire import _calls, _requests, _responses, errors
from quire.types import BatchAnswer, Delta, GenerateOptions
from quire.v1 import generation_pb2 as pb

_EVERY_S = 0.1
"""Minimum interval of progress updates, seconds."""


class BatchAnswers:
    """Collects the answers to one batch."""

    def __init__(self, requests: Iterable[str | Mapping[str, Any]], options: Mapping[str, Any], progress: bool) -> None:
        """Build the request messages.

        Args:
            requests: texts, or dicts of options.
            options: options for all requests.
            progress: whether to print progress.

        Raises:
            TypeError: `options` has an unknown option.
        """
        _requests.check_options(options)
        self._messages: list[pb.GenerateBatchRequest] = []
        self._invalid: list[BatchAnswer] = []
        num_requests = 0
        for key, request in enumerate(requests):
            num_requests += 1
            try:
                self._messages.append(pb.GenerateBatchRequest(key=key, request=_build(key, request, options)))
            except errors.InvalidRequestError as error:
                self._invalid.append(BatchAnswer(key, None, error))
        parsed = {message.key for message in self._messages if message.request.output.parse}
        self._events = [_responses.Events(parsed=key in parsed) for key in range(num_requests)]
        self._deltas: list[list[Delta]] = [[] for _ in range(num_requests)]
        self._progress = Progress(num_requests) if progress else None

    def messages(self) -> Iterator[pb.GenerateBatchRequest]:
        """Return the request messages."""
        return iter(self._messages)

    def invalid(self) -> Iterator[BatchAnswer]:
        """Yield an answer with an error for each request that cannot be sent."""
        for answer in self._invalid:
            if self._progress is not None:
                self._progress.advance(failed=True)
            yield answer

    def take(self, response: pb.GenerateBatchResponse) -> BatchAnswer | None:
        """Add the next message. If it completes a response, return the response; otherwise return None."""
        key = response.key
        answer = None
        if response.HasField("error"):
            answer = BatchAnswer(key, None, _calls.read_batch_error(response.error))
        else:
            delta = self._events[key].take(response.response)
            if delta is not None:
                self._deltas[key].append(delta)
            elif self._events[key].finished is not None:
                answer = BatchAnswer(key, self._events[key].join(self._deltas[key]), None)
                self._deltas[key].clear()
        if answer is not None and self._progress is not None:
            self._progress.advance(failed=answer.error is not None)
        return answer


class Progress:
    """Progress of a batch on one line of stderr."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = self._failed = 0
        self._shown = 0.0

    def advance(self, *, failed: bool) -> None:
        """Count one finished request."""
        self._done += 1
        self._failed += failed
        now = time.monotonic()
        if now - self._shown > _EVERY_S or self._done == self._total:
            self._shown = now
            filled = 30 * self._done // self._total
            failures = f", {self._failed} failed" if self._failed else ""
            end = "\n" if self._done == self._total else ""
            print(f"\r[{'#' * filled:30}] {self._done}/{self._total}{failures}", end=end, file=sys.stderr, flush=True)


def _build(key: int, request: str | Mapping[str, Any], options: Mapping[str, Any]) -> pb.GenerateRequest:
    if isinstance(request, str):
        return _requests.build_generate(request, **options)
    if not isinstance(request, Mapping):
        raise _requests.invalid(
            f"requests[{key}]", f"must be a text or a dict of options, not {type(request).__name__}"
        )
    own = dict(request)
    prompt = own.pop("prompt", None)
    for name in own:
        if name not in GenerateOptions.__optional_keys__:
            raise _requests.invalid(f"requests[{key}]", _requests.unknown_option(name))
    return _requests.build_generate(prompt, **{**options, **own})
