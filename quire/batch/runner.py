"""Sends what is left of a batch to a server, so many at a time, and writes down every answer as it comes.

Answers that may differ another time (429, 503, a lost connection) are no answers: the request is sent again after the
time that the server names, or longer and longer ones, until `patience_s` has passed without any success; then the run
ends and can be started again.
"""

import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.batch.jobs import BatchError, Job, make_answer
from quire.batch.journal import Journal

RETRIED = frozenset({408, 409, 429, 502, 503})
_LONGEST_PAUSE_S = 10.0
_SOCKET_TIMEOUT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go."""

    address: str
    """HOST:PORT of HTTP."""
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """What every request carries."""

    def connect(self) -> http.client.HTTPConnection:
        """A connection, which opens itself when it is needed."""
        if self.tls is not None:
            return http.client.HTTPSConnection(self.address, timeout=_SOCKET_TIMEOUT_S, context=self.tls)
        return http.client.HTTPConnection(self.address, timeout=_SOCKET_TIMEOUT_S)


@dataclass(slots=True)
class Progress:
    """What has come of the batch so far."""

    total: int
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    """Of this run."""
    started: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """The state in one line."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.done}/{self.total} done{failed}, {self.output_tokens / seconds:.0f} output tokens/s"


class Runner:
    """One run."""

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
    ) -> None:
        """`timeout_s` is the deadline of each request."""
        self._server = server
        self._journal = journal
        self._progress = progress
        self._concurrency = concurrency
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._last_success = time.monotonic()
        self._failure: Exception | None = None

    def run(self, jobs: Iterable[Job]) -> None:
        """Sends the jobs that are not done; returns when all are.

        Raises:
            BatchError: the server is away for too long, or a line is no request.
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
        connection = self._server.connect()
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
        pause = 0.1
        while not self._stopping.is_set():
            hint: float | None = None
            try:
                status, request_id, body, hint = self._send(job, connection)
                problem = str(body.get("error", {}).get("message", status))
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                status, problem = 503, str(error) or type(error).__name__
            if status not in RETRIED:
                self._write_down(job, make_answer(job, status, request_id, body), status)
                return
            if time.monotonic() - self._last_success > self._patience_s:
                raise BatchError(f"{self._server.address}: nothing succeeds for {self._patience_s:g} s ({problem})")
            self._stopping.wait(max(hint or 0.0, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _send(self, job: Job, connection: http.client.HTTPConnection) -> tuple[int, str, dict[str, Any], float | None]:
        headers = {"content-type": "application/json", **self._server.headers}
        if self._timeout_s is not None:
            headers["x-request-timeout"] = f"{self._timeout_s:g}"
        connection.request("POST", job.url, json.dumps(job.body).encode(), headers)
        response = connection.getresponse()
        body = json.loads(response.read())
        hint = response.headers.get("retry-after", "")
        return response.status, response.headers.get("x-request-id", ""), body, float(hint) if hint else None

    def _write_down(self, job: Job, answer: dict[str, Any], status: int) -> None:
        with self._lock:
            self._journal.append(answer)
            self._last_success = time.monotonic()
            progress = self._progress
            progress.done += 1
            progress.failed += status != 200
            usage = (answer.get("response") or {}).get("body", {}).get("usage") or answer.get("usage") or {}
            progress.output_tokens += usage.get("completion_tokens", 0)
            self._on_progress()
