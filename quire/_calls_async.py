"""Asyncio gRPC calls for `quire.aio`. `_calls_sync` has the same names for `quire.client`."""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
import grpc.aio

from quire import _calls, errors
from quire.v1.generation_pb2_grpc import GenerationServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:  # These imports are only for type checkers.
    from quire.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from quire.v1.model_pb2_grpc import ModelServiceAsyncStub

ResponseT = TypeVar("ResponseT")
UnaryMethod = grpc.aio.UnaryUnaryMultiCallable

_background: set["asyncio.Task[None]"] = set()
"""Calls started by `send`; without this reference they would be garbage-collected."""


class Connection:
    """A channel, the stubs of its services, and the metadata for calls."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, token: str) -> None:
        """Open the channel; see `quire.AsyncClient` for the arguments."""
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, _calls.channel_options(target))
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, _calls.channel_options(target))
        self._token = token
        self.generation: GenerationServiceAsyncStub = GenerationServiceStub(self._channel)
        self.models: ModelServiceAsyncStub = ModelServiceStub(self._channel)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata for a call that starts now."""
        return _calls.call_metadata(self._token)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class Stream(Generic[ResponseT]):
    """The responses of a running call."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._cancelled = False

    async def read(self) -> ResponseT | None:
        """Return the next response; None at the end.

        Raises:
            QuireError: the call failed.
        """
        try:
            response: ResponseT = await self._call.read()
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None
        except asyncio.CancelledError:
            # grpc.aio raises CancelledError both when the call is cancelled and when the reading task is cancelled.
            if self._cancelled:
                raise errors.CancelledError("the call was cancelled", code="CANCELLED") from None
            raise
        return None if response is grpc.aio.EOF else response

    def cancel(self) -> bool:
        """Cancel the call; return False if it has ended."""
        self._cancelled = True
        return bool(self._call.cancel())


class Flag:
    """An event that can be awaited for a limited time."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Set the flag and wake all waiters."""
        self._event.set()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._event.is_set()

    async def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, at most for `seconds`; return whether it is."""
        try:
            return await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return False


def send(method: Any, request: Any, *, timeout: float, metadata: tuple[tuple[str, str], ...]) -> None:
    """Make a unary call in the background; ignore its result and errors."""
    task = asyncio.ensure_future(_ignore(method(request, timeout=timeout, metadata=metadata)))
    _background.add(task)
    task.add_done_callback(_background.discard)


async def _ignore(call: Any) -> None:
    with contextlib.suppress(grpc.RpcError):
        await call
