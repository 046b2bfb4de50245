"""Asyncio Python client: the same calls as `quire.client`, to be awaited or iterated with `async for`.

An `AsyncClient` belongs to the event loop in which it was created.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

import grpc
import grpc.aio

from quire import _calls, _requests, _responses, errors
from quire._batch import BatchAnswers
from quire._resume import Resumption
from quire.types import (
    BatchAnswer,
    ChoiceFinished,
    Completion,
    Delta,
    Embeddings,
    Finished,
    GenerateOptions,
    Message,
    Model,
    Prompt,
    SchedulingOptions,
    Tokenized,
)
from quire.v1 import generation_pb2 as pb
from quire.v1 import model_pb2
from quire.v1.generation_pb2_grpc import GenerationServiceStub
from quire.v1.model_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:  # these two exist for type checkers only
    from quire.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from quire.v1.model_pb2_grpc import ModelServiceAsyncStub


class _Call(Protocol):
    """A running server-streaming call."""

    async def read(self) -> Any: ...
    def cancel(self) -> bool: ...


class AsyncGeneration(AsyncIterator[Delta]):
    """A running request: an asynchronous iterator of deltas, then a `finished` result."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._cancelled = False
        self._events = _responses.Events()

    @property
    def finished(self) -> Finished | None:
        """The result; None until the iteration is over."""
        return self._events.finished

    @property
    def prompt(self) -> Prompt | None:
        """The prompt, if `echo` or `prompt_logprobs` is set; available before the first delta."""
        return self._events.prompt

    @property
    def choices_finished(self) -> Mapping[int, ChoiceFinished]:
        """With n > 1: the ends of the choices so far, by index."""
        return self._events.choices

    async def __anext__(self) -> Delta:
        """Return the next delta.

        Raises:
            QuireError: the request failed; the class tells why.
        """
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                assert isinstance(response, pb.GenerateResponse)
                delta = self._events.take(response)
                if delta is not None:
                    return delta
        except grpc.aio.AioRpcError as error:
            raise _calls.read_error(error) from None
        except asyncio.CancelledError:
            # grpc.aio raises CancelledError both for a cancelled call and for a cancelled reading task.
            if self._cancelled:
                raise errors.CancelledError("the call was cancelled", code="CANCELLED") from None
            raise
        _responses.require_finished(self.finished)
        raise StopAsyncIteration

    async def result(self) -> Completion:
        """Wait for the end; return everything that was not iterated over as one answer.

        Raises:
            QuireError: the request failed.
        """
        return self._events.join([delta async for delta in self])

    def cancel(self) -> None:
        """Cancel the request; a later iteration raises `CancelledError` unless it has ended."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.cancel()


class _ResumingCall:
    """A `Generate` call that resumes after a lost connection."""

    def __init__(
        self, stub: "GenerationServiceAsyncStub", request: pb.GenerateRequest, timeout: float | None, token: str
    ) -> None:
        self._stub = stub
        self._token = token
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._resumption = Resumption(request)
        self._cancelled = False
        self._cancelling: asyncio.Task[None] | None = None
        self._call: Any = stub.Generate(request, timeout=timeout, metadata=_calls.call_metadata(self._token))

    async def read(self) -> Any:
        while True:
            try:
                response = await self._call.read()
            except grpc.aio.AioRpcError as error:
                wait_s = self._resumption.failed(_calls.read_error(error))
                if wait_s is None or self._cancelled:
                    raise
                await asyncio.sleep(wait_s)
                self._try_again()
                continue
            if isinstance(response, pb.ResumeResponse):
                response = response.response
            if response is not grpc.aio.EOF:
                self._resumption.received(response)
            return response

    def cancel(self) -> bool:
        self._cancelled = True
        cancelled = bool(self._call.cancel())
        if cancelled:
            # Without this, the server would keep the request for this client to resume.
            self._cancelling = asyncio.ensure_future(self._send_cancel())
        return cancelled

    async def _send_cancel(self) -> None:
        request_id = self._resumption.request.request_id
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.Cancel(
                pb.CancelRequest(request_id=request_id), timeout=5, metadata=_calls.call_metadata(self._token)
            )

    def _try_again(self) -> None:
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.001)
        metadata = _calls.call_metadata(self._token)
        if self._resumption.sends_again:
            self._call = self._stub.Generate(self._resumption.request, timeout=left, metadata=metadata)
        else:
            resume = self._resumption.resume_request()
            self._call = self._stub.Resume(resume, timeout=left, metadata=metadata)


class AsyncClient:
    """A connection to a Quire server.

    Args:
        target: "HOST:PORT" of the gRPC listener, or any other gRPC target.
        credentials: TLS credentials; without them the connection is not encrypted.
        token: bearer token for authentication.
    """

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None, token: str = "") -> None:
        self._token = token
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, _calls.CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, _calls.CHANNEL_OPTIONS)
        self._generation: GenerationServiceAsyncStub = GenerationServiceStub(self._channel)
        self._models: ModelServiceAsyncStub = ModelServiceStub(self._channel)

    def generate(
        self, prompt: str | None = None, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration:
        """Start generating from a text, from `messages=[…]` or from `token_ids=[…]`.

        Args:
            prompt: the text to continue.
            timeout: seconds until the server stops and the iteration raises `DeadlineError`.
            options: see `quire.GenerateOptions`.

        Raises:
            InvalidRequestError: a field cannot hold its value. All other errors are raised while iterating.
        """
        request = _requests.build_generate(prompt, **options)
        if request.resumable:
            return AsyncGeneration(_ResumingCall(self._generation, request, timeout, self._token))
        metadata = _calls.call_metadata(self._token)
        return AsyncGeneration(self._generation.Generate(request, timeout=timeout, metadata=metadata))

    async def generate_batch(
        self,
        requests: Iterable[str | Mapping[str, Any]],
        *,
        progress: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109 - it becomes the deadline that the server sees
        **options: Unpack[GenerateOptions],
    ) -> AsyncIterator[BatchAnswer]:
        """Run many requests on one call; yield each answer when it is complete. See `Client.generate_batch`.

        Raises:
            InvalidRequestError: a field cannot hold its value.
            QuireError: the call failed. The error of a single request is in its answer.
        """
        answers = BatchAnswers(requests, options, progress)
        call = self._generation.GenerateBatch(
            answers.messages(), timeout=timeout, metadata=_calls.call_metadata(self._token)
        )
        try:
            async for response in call:
                answer = answers.take(response)
                if answer is not None:
                    yield answer
        except grpc.aio.AioRpcError as error:
            raise _calls.read_error(error) from None

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        model: str = "",
        pooling: str = "last",
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        scheduling: SchedulingOptions | None = None,
        request_id: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - it becomes the deadline that the server sees
    ) -> Embeddings:
        """Return one vector per prompt: the model's last hidden states, pooled.

        Args:
            inputs: texts or lists of token ids, at most 2,048.
            model: name of the model; empty: the served model.
            pooling: "last" uses the hidden state of the last token, "mean" the mean over all tokens.
            normalize: scale vectors to length 1.
            truncate_prompt_tokens: keep only this many last tokens of each prompt.
            scheduling: scheduling options of the prompts.
            request_id: id of the request; empty: chosen by the server.
            timeout: seconds until the server stops.

        Raises:
            QuireError: the call failed; no vector is returned.
        """
        request = _requests.build_embed(
            inputs,
            model=model,
            pooling=pooling,
            normalize=normalize,
            truncate_prompt_tokens=truncate_prompt_tokens,
            scheduling=scheduling,
            request_id=request_id,
        )
        try:
            response = await self._generation.Embed(
                request, timeout=timeout, metadata=_calls.call_metadata(self._token)
            )
        except grpc.aio.AioRpcError as error:
            raise _calls.read_error(error) from None
        return _responses.read_embeddings(response)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        add_special_tokens: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109 - it becomes the deadline that the server sees
    ) -> Tokenized:
        """Return the token ids that `generate` would run on.

        Raises:
            QuireError: the call failed.
        """
        request = _requests.build_tokenize(text, messages, model=model, add_special_tokens=add_special_tokens)
        try:
            return _responses.read_tokenized(
                await self._generation.Tokenize(request, timeout=timeout, metadata=_calls.call_metadata(self._token))
            )
        except grpc.aio.AioRpcError as error:
            raise _calls.read_error(error) from None

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        include_special_tokens: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109 - it becomes the deadline that the server sees
    ) -> str:
        """Return the text of a token sequence.

        Raises:
            QuireError: the call failed.
        """
        request = _requests.build_detokenize(token_ids, model=model, include_special_tokens=include_special_tokens)
        try:
            response = await self._generation.Detokenize(
                request, timeout=timeout, metadata=_calls.call_metadata(self._token)
            )
        except grpc.aio.AioRpcError as error:
            raise _calls.read_error(error) from None
        return response.text

    async def get_model(
        self,
        name: str = "",
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it becomes the deadline that the server sees
    ) -> Model:
        """Describe a served model; by default the one that is served.

        Raises:
            QuireError: the call failed.
        """
        request = model_pb2.GetModelRequest(name=name)
        try:
            response = await self._models.GetModel(request, timeout=timeout, metadata=_calls.call_metadata(self._token))
        except grpc.aio.AioRpcError as error:
            raise _calls.read_error(error) from None
        return _responses.read_model(response.model)

    async def close(self) -> None:
        """Close the connection; running requests are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()
