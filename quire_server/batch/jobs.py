"""Lines of a batch: requests in two forms, and the answers in the same form as the request.

OpenAI's:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
           → {"id": …, "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}}, "error": null}

Simple:    {"id": "a", "prompt": "…", "max_tokens": 64}, or "messages" instead of "prompt"; the other fields are those
           of the HTTP API. If a line has no id, its line number is the id.
           → {"id": "a", "text": "…", "finish_reason": "stop", "usage": {…}} or {"id": "a", "error": {…}}
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.json_text import describe_json_error

URLS = ("/v1/chat/completions", "/v1/completions")


class BatchError(Exception):
    """The batch cannot run; the message is one line."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a batch."""

    id: str
    url: str
    body: dict[str, Any]
    simple: bool


def read_jobs(path: Path) -> Iterator[Job]:
    """Yield the requests of a file, one per line; empty lines are skipped.

    Raises:
        BatchError: a line is not a valid request.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _job(line, number, f"{path}:{number}")


def read_ids(path: Path) -> list[str]:
    """Return the ids of all requests in a file, after checking every line.

    Raises:
        BatchError: a line is not a valid request, or repeats an id.
    """
    ids: dict[str, None] = {}
    for number, job in enumerate(read_jobs(path), 1):
        if job.id in ids:
            raise BatchError(f"{path}: request {number}: duplicate id {job.id!r}; give every request its own id")
        ids[job.id] = None
    return list(ids)


def make_answer(job: Job, status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    if not job.simple:
        response = {"status_code": status, "request_id": request_id, "body": body}
        return {"id": f"batch_req_{request_id or job.id}", "custom_id": job.id, "response": response, "error": None}
    if status != 200:
        return {"id": job.id, "error": body.get("error", body)}
    choices = [{"text": _text(choice), "finish_reason": choice["finish_reason"]} for choice in body["choices"]]
    answer = choices[0] if len(choices) == 1 else {"choices": choices}
    return {"id": job.id, **answer, "usage": body["usage"]}


def id_of_answer(answer: dict[str, Any]) -> str:
    """Return the id of the request to which an answer line belongs."""
    return str(answer["custom_id"] if "custom_id" in answer else answer["id"])


def _job(line: bytes, number: int, where: str) -> Job:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise BatchError(f"{where}: {describe_json_error(error)}") from None
    if not isinstance(request, dict):
        raise BatchError(f"{where}: must be a JSON object")
    if "custom_id" in request or "body" in request:
        url, body = request.get("url"), request.get("body")
        if not isinstance(request.get("custom_id"), str) or not isinstance(body, dict):
            raise BatchError(f"{where}: requires a string custom_id and an object body")
        if url not in URLS:
            raise BatchError(f"{where}: url: unknown value {url!r}; use one of {', '.join(URLS)}")
        return Job(request["custom_id"], url, _without_streaming(body), simple=False)
    job_id = str(request.pop("id", number))
    if ("prompt" in request) == ("messages" in request):
        hint = "; this looks like a file of quire bench offline" if "prompt_token_ids" in request else ""
        raise BatchError(f"{where}: requires exactly one of prompt and messages{hint}")
    return Job(job_id, URLS[0] if "messages" in request else URLS[1], _without_streaming(request), simple=True)


def _without_streaming(body: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the body without streaming options, because a batch answer is one object."""
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")}


def _text(choice: dict[str, Any]) -> str | None:
    text: str | None = choice["text"] if "text" in choice else choice["message"]["content"]
    return text
