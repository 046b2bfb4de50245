"""Sends the remaining requests of a batch to a server, with limited concurrency, and records every answer.

Transient failures (429, 503, a lost connection) are retried after the delay that the server names, or with exponential
backoff. After `patience_s` without any success, the run ends and can be started again. Permanent failures, such as the
address of another protocol, end the run at once.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quire_server.batch.jobs import BatchError, Job, make_answer
from quire_server.batch.journal import Journal
from quire_server.http_client import Server, is_completion_answer, problem_of, read_object

RETRIED_STATUSES = frozenset({408, 409, 429, 502, 503})
_MAX_PAUSE_S = 10.0
_SOCKET_TIMEOUT_S = 24 * 3600.0
"""Socket timeout in seconds; longer than any request takes."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """A server's HTTP response."""

    status: int
    request_id: str
    body: dict[str, Any]
    """The body's JSON object; empty if the body is not a JSON object."""
    retry_after_s: float


@dataclass(slots=True)
class Progress:
    """Progress of a batch."""

    total: int
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    """Number of output tokens generated in this run."""
    started: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-9)
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.done}/{self.total} done{failed}, {self.output_tokens / seconds:.0f} output tokens/s"


class Runner:
    """One run of a batch."""

    def __init__(
        self,
        server: Server,
        journal: Journal,
        progress: Progress,
        *,
        concurrency: int,
        patience_s: float,
        timeout_s: float | None,
        on_progress: Callable[[], None],
        on_problem: Callable[[str], None],
    ) -> None:
        """Create a run.

        Args:
            server: the server.
            journal: file of answers.
            progress: updated with every answer.
            concurrency: maximum number of requests in flight.
            patience_s: maximum time without an answered request, seconds.
            timeout_s: deadline of each request, seconds; None for none.
            on_progress: called after every answer.
            on_problem: called with a description when the server becomes unreachable, and not again until the next
                result.
        """
        self._server = server
        self._journal = journal
        self._progress = progress
        self._concurrency = concurrency
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._on_problem = on_problem
        self._is_unreachable = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._last_success = time.monotonic()
        self._failure: Exception | None = None

    def run(self, jobs: Iterable[Job]) -> None:
        """Send the jobs that are not done; return when all jobs are done.

        Raises:
            BatchError: the server is unreachable for too long or not a Quire server, or a line is not a valid
                request.
        """
        left = (job for job in jobs if job.id not in self._journal.done)
        threads = [threading.Thread(target=self._work, args=(left,), daemon=True) for _ in range(self._concurrency)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._stopping.set()
        if self._failure is not None:
            raise self._failure

    def _work(self, jobs: Iterator[Job]) -> None:
        connection = self._server.connect(_SOCKET_TIMEOUT_S)
        try:
            while not self._stopping.is_set():
                with self._lock:
                    job = next(jobs, None)
                if job is None:
                    return
                self._answer(job, connection)
        except Exception as error:
            self._failure = self._failure or error
            self._stopping.set()
        finally:
            connection.close()

    def _answer(self, job: Job, connection: http.client.HTTPConnection) -> None:
        address, pause = self._server.address, 0.1
        while not self._stopping.is_set():
            retry_after_s = 0.0
            try:
                reply = self._send(job, connection)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                failure = self._server.failure(error)
                if failure.permanent:
                    raise BatchError(f"{address}: {failure.description}") from None
                problem = failure.description
                self._unreachable(f"{address}: {problem}")
            else:
                if reply.status not in RETRIED_STATUSES and is_completion_answer(reply.status, reply.body):
                    answer = make_answer(job, reply.status, reply.request_id, reply.body)
                    self._record(job, answer, reply.status)
                    return
                problem, retry_after_s = problem_of(reply.status, reply.body), reply.retry_after_s
                if reply.status < 500 and reply.status not in RETRIED_STATUSES:
                    raise BatchError(f"{address}: {problem}")
            if time.monotonic() - self._last_success > self._patience_s:
                raise BatchError(f"{address}: {problem} (gave up after {self._patience_s:g} s without success)")
            self._stopping.wait(max(retry_after_s, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _send(self, job: Job, connection: http.client.HTTPConnection) -> _Reply:
        headers = {"content-type": "application/json", **self._server.headers}
        if self._timeout_s is not None:
            headers["x-request-timeout"] = f"{self._timeout_s:g}"
        connection.request("POST", job.url, json.dumps(job.body).encode(), headers)
        response = connection.getresponse()
        hint = response.headers.get("retry-after", "")
        return _Reply(
            status=response.status,
            request_id=response.headers.get("x-request-id", ""),
            body=read_object(response.read()),
            # Proxies may send a date instead of seconds.
            retry_after_s=float(hint) if hint.isdecimal() else 0.0,
        )

    def _unreachable(self, problem: str) -> None:
        with self._lock:
            is_known, self._is_unreachable = self._is_unreachable, True
            if not is_known:
                self._on_problem(problem)

    def _record(self, job: Job, answer: dict[str, Any], status: int) -> None:
        with self._lock:
            self._journal.append(answer)
            self._last_success = time.monotonic()
            self._is_unreachable = False
            progress = self._progress
            progress.done += 1
            progress.failed += status != 200
            usage = (answer.get("response") or {}).get("body", {}).get("usage") or answer.get("usage") or {}
            progress.output_tokens += usage.get("completion_tokens", 0)
            self._on_progress()
