"""Blocking gRPC calls for `quire.client`. `_calls_async` has the same names for `quire.aio`."""

import threading
from typing import Any, Generic, TypeVar

import grpc

from quire import _calls
from quire.v1.generation_pb2_grpc import GenerationServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub

ResponseT = TypeVar("ResponseT")
UnaryMethod = grpc.UnaryUnaryMultiCallable


class Connection:
    """A channel, the stubs of its services, and the metadata for calls."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, token: str) -> None:
        """Open the channel; see `quire.Client` for the arguments."""
        if credentials is None:
            self._channel = grpc.insecure_channel(target, _calls.channel_options(target))
        else:
            self._channel = grpc.secure_channel(target, credentials, _calls.channel_options(target))
        self._token = token
        self.generation = GenerationServiceStub(self._channel)
        self.models = ModelServiceStub(self._channel)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata for a call that starts now."""
        return _calls.call_metadata(self._token)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class Stream(Generic[ResponseT]):
    """The responses of a running call; dropping it cancels the call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def read(self) -> ResponseT | None:
        """Return the next response; None at the end.

        Raises:
            QuireError: the call failed.
        """
        try:
            response: ResponseT | None = next(self._call, None)
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None
        return response

    def cancel(self) -> bool:
        """Cancel the call; return False if it has ended."""
        return bool(self._call.cancel())


class Flag:
    """An event that can be awaited for a limited time."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Set the flag and wake all waiters."""
        self._event.set()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, at most for `seconds`; return whether it is."""
        return self._event.wait(seconds)


def send(method: Any, request: Any, *, timeout: float, metadata: tuple[tuple[str, str], ...]) -> None:
    """Make a unary call in the background; ignore its result and errors."""
    future = method.future(request, timeout=timeout, metadata=metadata)
    # The callback keeps a reference to the future. Otherwise garbage collection would cancel the call.
    future.add_done_callback(lambda _future: None)
