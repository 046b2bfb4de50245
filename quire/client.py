"""The blocking Python client.

One `Client` is one connection; it may be shared by threads. A `Generation` is one running request: iterate
over it for deltas as the model produces them, then look at `finished`. Leaving a generation early (`cancel`,
the end of a `with` block, or simply dropping it) stops the work on the server.
"""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, Unpack

import grpc

from quire import _mapping
from quire.types import Completion, Delta, Finished, GenerateOptions, Message, Model, Tokenized
from quire.v1 import generation_pb2 as pb
from quire.v1 import model_pb2
from quire.v1.generation_pb2_grpc import GenerationServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub


class _Call(Protocol):
    """A running server-streaming call."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]: ...
    def __next__(self) -> pb.GenerateResponse: ...
    def cancel(self) -> bool: ...


class Generation(Iterator[Delta]):
    """A running request: an iterator of deltas, then a `finished` result."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self.finished: Finished | None = None
        """How it ended; None until the iteration is over."""

    def __next__(self) -> Delta:
        """The next delta.

        Raises:
            QuireError: the request failed; the class tells why.
        """
        try:
            while True:
                response = next(self._call)
                event = response.WhichOneof("event")
                if event == "delta":
                    return _mapping.read_delta(response.delta)
                if event == "finished":
                    self.finished = _mapping.read_finished(response.finished)
        except grpc.RpcError as error:
            raise _mapping.read_error(error) from None
        except StopIteration:
            _mapping.require_finished(self.finished)
            raise

    def result(self) -> Completion:
        """Waits for the end and gives everything that was not yet iterated over as one answer.

        Raises:
            QuireError: the request failed.
        """
        return _mapping.join(list(self), self.finished)

    def cancel(self) -> None:
        """Stops the request; a later `next` raises `CancelledError` unless it had ended."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._call.cancel()


class Client:
    """A connection to a Quire server.

    Args:
        target: "HOST:PORT" of the gRPC listener, or any other gRPC target.
        credentials: for TLS; without them the connection is in the clear.
    """

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(target, _mapping.CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, _mapping.CHANNEL_OPTIONS)
        self._generation = GenerationServiceStub(self._channel)
        self._models = ModelServiceStub(self._channel)

    def generate(
        self, prompt: str | None = None, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Starts generating from a text, from `messages=[…]` or from `token_ids=[…]`.

        Args:
            prompt: the text to continue.
            timeout: seconds until the server stops and the iteration raises `DeadlineError`.
            options: see `quire.GenerateOptions`.

        Raises:
            InvalidRequestError: a value that its field cannot hold. All other errors come while iterating.
        """
        request = _mapping.build_generate(prompt, **options)
        metadata = _mapping.trace_metadata()
        return Generation(self._generation.Generate(request, timeout=timeout, metadata=metadata))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> Tokenized:
        """The token ids that `generate` would run on.

        Raises:
            QuireError: the call failed.
        """
        request = _mapping.build_tokenize(text, messages, model=model, add_special_tokens=add_special_tokens)
        try:
            return _mapping.read_tokenized(
                self._generation.Tokenize(request, timeout=timeout, metadata=_mapping.trace_metadata())
            )
        except grpc.RpcError as error:
            raise _mapping.read_error(error) from None

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        include_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """The text of a token sequence.

        Raises:
            QuireError: the call failed.
        """
        request = _mapping.build_detokenize(token_ids, model=model, include_special_tokens=include_special_tokens)
        try:
            return self._generation.Detokenize(request, timeout=timeout, metadata=_mapping.trace_metadata()).text
        except grpc.RpcError as error:
            raise _mapping.read_error(error) from None

    def get_model(self, name: str = "", *, timeout: float | None = None) -> Model:
        """Describes a served model; by default the one that is served.

        Raises:
            QuireError: the call failed.
        """
        request = model_pb2.GetModelRequest(name=name)
        try:
            response = self._models.GetModel(request, timeout=timeout, metadata=_mapping.trace_metadata())
        except grpc.RpcError as error:
            raise _mapping.read_error(error) from None
        return _mapping.read_model(response.model)

    def close(self) -> None:
        """Closes the connection; requests that still run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()
