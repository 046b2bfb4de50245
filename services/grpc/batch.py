"""Batches: many generation requests on one bidirectional call, with interleaved responses.

The client assigns a key to each request, and each response contains its request's key. Each request runs like a request
to `Generate`. A client that reads slowly delays only its own call. At most `MAX_IN_PROGRESS` requests run at a time.
Further requests wait in gRPC's buffer.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT
from services.access.shares import SMALL_REQUEST_BYTES, Turns
from services.calls.context import Caller
from services.calls.delivery import FINAL_WRITE_TIMEOUT_S
from services.calls.generation import Generator
from services.errors import InternalError, RequestCancelledError, to_error
from services.grpc.boundary import MalformedRequest
from shared.errors import FieldViolation, InvalidRequestError, QuireError
from shared.ids import draw_error_id
from shared.logging import get_logger

MAX_IN_PROGRESS = 256
"""Maximum number of concurrent requests per call."""


class Batch:
    """One call of GenerateBatch."""

    def __init__(
        self,
        generator: Generator,
        caller: Callable[[], Caller],
        write: Callable[[v1.GenerateBatchResponse], Awaitable[object]],
        large_requests: Turns,
    ) -> None:
        """Create a batch.

        Args:
            generator: runs the requests.
            caller: returns the caller of the next request, with the current time as its arrival.
            write: sends a message to the client.
            large_requests: turns for checking a large request.
        """
        self._generator = generator
        self._caller = caller
        self._write = write
        self._large_requests = large_requests
        self._writing = asyncio.Lock()
        self._room = asyncio.Semaphore(MAX_IN_PROGRESS)
        self._closing = False
        self._running: dict[int, asyncio.Task[None]] = {}

    async def run(self, requests: AsyncIterator[v1.GenerateBatchRequest | MalformedRequest]) -> None:
        """Run all requests. Return when the client has closed its side and every request has ended.

        Raises:
            InvalidRequestError: a message is malformed as a whole; all requests are cancelled.
        """
        try:
            async for request in requests:
                if isinstance(request, MalformedRequest):
                    raise InvalidRequestError(FieldViolation(request.field, request.description))
                await self._take(request)
            while self._running:
                await asyncio.wait(self._running.values())
        finally:
            self._closing = True
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            # Let the current write finish before the status is sent, unless the client does not read.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FINAL_WRITE_TIMEOUT_S), self._writing:
                    pass

    async def _take(self, request: v1.GenerateBatchRequest) -> None:
        key = request.key
        match request.WhichOneof("action"):
            case "cancel":
                # Let a new task start first, because a task that is cancelled before its start sends no end.
                await asyncio.sleep(0)
                task = self._running.get(key)
                if task is not None:
                    task.cancel()
            case "request":
                if key in self._running:
                    raise InvalidRequestError(
                        FieldViolation("key", f"{key} is in use by a request in progress; choose another key")
                    )
                await self._room.acquire()
                task = asyncio.create_task(self._answer(key, request.request))
                self._running[key] = task
                task.add_done_callback(lambda _: self._done(key))
            case _:
                raise InvalidRequestError(FieldViolation("action", "missing; add one of `request` and `cancel`"))

    def _done(self, key: int) -> None:
        self._running.pop(key, None)
        self._room.release()

    async def _answer(self, key: int, request: v1.GenerateRequest) -> None:
        failure: QuireError
        try:
            if request.ByteSize() > SMALL_REQUEST_BYTES:
                await self._large_requests.begin_work(CURRENT.get().name)
            await self._generator.run(
                request,
                self._caller(),
                lambda response: self._send(v1.GenerateBatchResponse(key=key, response=response)),
            )
            return
        except QuireError as error:
            failure = error.without_frames()
        except asyncio.CancelledError:
            failure = RequestCancelledError("the request was cancelled")
        except Exception as unexpected:
            failure = InternalError(draw_error_id())
            get_logger().error("request failed", error_id=failure.error_id, exc_info=unexpected)
        if not self._closing:
            await self._send(v1.GenerateBatchResponse(key=key, error=to_error(failure)))

    async def _send(self, message: v1.GenerateBatchResponse) -> None:
        # A gRPC write cannot be cancelled: it finishes even if its request is cancelled.
        writing = asyncio.ensure_future(self._write_alone(message))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # No task awaits this write, and an error only means that the client has disconnected.
            writing.add_done_callback(_retrieve_exception)
            raise

    async def _write_alone(self, message: v1.GenerateBatchResponse) -> None:
        async with self._writing:
            await self._write(message)


def _retrieve_exception(writing: "asyncio.Future[None]") -> None:
    """Retrieve the exception of a write, so that asyncio does not report it as never retrieved."""
    if not writing.cancelled():
        writing.exception()
