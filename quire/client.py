"""The blocking Python client.

One `Client` is one connection; it may be shared by threads. A `Generation` is one running request: iterate
over it for deltas as the model produces them, then look at `finished`. Leaving a generation early (`cancel`,
the end of a `with` block, or simply dropping it) stops the work on the server.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

import grpc

from quire import _mapping
from quire._batch import BatchAnswers
from quire.types import (
    BatchAnswer,
    ChoiceFinished,
    Completion,
    Delta,
    Finished,
    GenerateOptions,
    Message,
    Model,
    Prompt,
    Tokenized,
)
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
        self._events = _mapping.Events()

    @property
    def finished(self) -> Finished | None:
        """How it ended; None until the iteration is over."""
        return self._events.finished

    @property
    def prompt(self) -> Prompt | None:
        """The prompt, if `echo` or `prompt_logprobs` asked for it; there before the first delta."""
        return self._events.prompt

    @property
    def choices_finished(self) -> Mapping[int, ChoiceFinished]:
        """With n > 1: how choices have ended so far."""
        return self._events.choices

    def __next__(self) -> Delta:
        """The next delta.

        Raises:
            QuireError: the request failed; the class tells why.
        """
        try:
            while True:
                delta = self._events.take(next(self._call))
                if delta is not None:
                    return delta
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
        return self._events.join(list(self))

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
        token: a bearer token that says who calls.
    """

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None, token: str = "") -> None:
        self._token = token
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
        metadata = _mapping.call_metadata(self._token)
        return Generation(self._generation.Generate(request, timeout=timeout, metadata=metadata))

    def generate_batch(
        self,
        requests: Iterable[str | Mapping[str, Any]],
        *,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[BatchAnswer]:
        """Answers many requests over one call, each as soon as it is complete, in whatever order they are.

        Args:
            requests: texts, or dicts of options with a text as "prompt".
            progress: show on stderr how far it is.
            timeout: seconds until the server stops.
            options: what all requests share; a request's own options come first.

        Raises:
            InvalidRequestError: a value that its field cannot hold.
            QuireError: the call failed; what failed in one request is in its answer.
        """
        answers = BatchAnswers(requests, options, progress)
        call = self._generation.GenerateBatch(
            answers.messages(), timeout=timeout, metadata=_mapping.call_metadata(self._token)
        )
        return self._read_batch(call, answers)

    @staticmethod
    def _read_batch(call: Iterator[pb.GenerateBatchResponse], answers: BatchAnswers) -> Iterator[BatchAnswer]:
        try:
            for response in call:
                answer = answers.take(response)
                if answer is not None:
                    yield answer
        except grpc.RpcError as error:
            raise _mapping.read_error(error) from None

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
                self._generation.Tokenize(request, timeout=timeout, metadata=_mapping.call_metadata(self._token))
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
            return self._generation.Detokenize(
                request, timeout=timeout, metadata=_mapping.call_metadata(self._token)
            ).text
        except grpc.RpcError as error:
            raise _mapping.read_error(error) from None

    def get_model(self, name: str = "", *, timeout: float | None = None) -> Model:
        """Describes a served model; by default the one that is served.

        Raises:
            QuireError: the call failed.
        """
        request = model_pb2.GetModelRequest(name=name)
        try:
            response = self._models.GetModel(request, timeout=timeout, metadata=_mapping.call_metadata(self._token))
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
