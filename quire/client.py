"""The blocking Python client.

One `Client` is one connection; it may be shared by threads. A `Generation` is one running request: iterate
over it for deltas as the model produces them, then look at `finished`. Leaving a generation early (`cancel`,
the end of a `with` block, or simply dropping it) stops the work on the server.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

import grpc

from quire import _calls, _requests, _responses
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


class _Call(Protocol):
    """A running server-streaming call."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]: ...
    def __next__(self) -> pb.GenerateResponse: ...
    def cancel(self) -> bool: ...


class Generation(Iterator[Delta]):
    """A running request: an iterator of deltas, then a `finished` result."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._events = _responses.Events()

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
            raise _calls.read_error(error) from None
        except StopIteration:
            _responses.require_finished(self.finished)
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


class _Resumed:
    """A `Resume` call that looks like `Generate`."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        return self

    def __next__(self) -> pb.GenerateResponse:
        response: pb.GenerateResponse = next(self._call).response
        return response

    def cancel(self) -> bool:
        return bool(self._call.cancel())


class _ResumingCall:
    """A `Generate` call that goes on after its connection was lost."""

    def __init__(
        self, stub: GenerationServiceStub, request: pb.GenerateRequest, timeout: float | None, token: str
    ) -> None:
        self._stub = stub
        self._token = token
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._resumption = Resumption(request)
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._call: _Call = stub.Generate(request, timeout=timeout, metadata=_calls.call_metadata(self._token))

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        return self

    def __next__(self) -> pb.GenerateResponse:
        while True:
            try:
                response = next(self._call)
                self._resumption.received(response)
                return response
            except grpc.RpcError as error:
                wait_s = self._resumption.failed(_calls.read_error(error))
                if wait_s is None or self._cancelled.wait(wait_s):
                    raise
                self._try_again()

    def cancel(self) -> bool:
        with self._lock:
            self._cancelled.set()
            cancelled = self._call.cancel()
        if cancelled:
            # Fire and forget: otherwise the server would wait for this client to come back.
            self._stub.Cancel.future(
                pb.CancelRequest(request_id=self._resumption.request.request_id),
                timeout=5,
                metadata=_calls.call_metadata(self._token),
            )
        return cancelled

    def _try_again(self) -> None:
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.001)
        metadata = _calls.call_metadata(self._token)
        with self._lock:
            if self._cancelled.is_set():
                return
            if self._resumption.sends_again:
                self._call = self._stub.Generate(self._resumption.request, timeout=left, metadata=metadata)
            else:
                resume = self._resumption.resume_request()
                self._call = _Resumed(self._stub.Resume(resume, timeout=left, metadata=metadata))


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
            self._channel = grpc.insecure_channel(target, _calls.CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, _calls.CHANNEL_OPTIONS)
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
        request = _requests.build_generate(prompt, **options)
        if request.resumable:
            return Generation(_ResumingCall(self._generation, request, timeout, self._token))
        metadata = _calls.call_metadata(self._token)
        return Generation(self._generation.Generate(request, timeout=timeout, metadata=metadata))

    def resume(
        self,
        request_id: str,
        *,
        from_tokens: Sequence[int] = (),
        from_text_bytes: Sequence[int] = (),
        timeout: float | None = None,
    ) -> Generation:
        """Goes on with a resumable request that another connection, or another process, has begun.

        Args:
            request_id: its id.
            from_tokens: tokens that are known already, per choice; they are not sent again.
            from_text_bytes: bytes of text, in UTF-8, that are known already; by default as the tokens stand for.
            timeout: seconds until the iteration raises `DeadlineError`.
        """
        request = pb.ResumeRequest(request_id=request_id, from_tokens=from_tokens, from_text_bytes=from_text_bytes)
        call = self._generation.Resume(request, timeout=timeout, metadata=_calls.call_metadata(self._token))
        return Generation(_Resumed(call))

    def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a resumable request, wherever it runs; the server forgets it.

        Raises:
            QuireError: the call failed; `RequestNotFoundError`: nothing is known of the request.
        """
        try:
            self._generation.Cancel(
                pb.CancelRequest(request_id=request_id), timeout=timeout, metadata=_calls.call_metadata(self._token)
            )
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None

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
            answers.messages(), timeout=timeout, metadata=_calls.call_metadata(self._token)
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
            raise _calls.read_error(error) from None

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        model: str = "",
        pooling: str = "last",
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        scheduling: SchedulingOptions | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Embeddings:
        """Turns prompts into vectors: the model's last hidden states, pooled.

        Args:
            inputs: texts or lists of token ids, at most 2,048.
            model: the model's name; by default the one that is served.
            pooling: "last" takes the hidden state of the last token, "mean" the mean over all tokens.
            normalize: scale vectors to length 1.
            truncate_prompt_tokens: keep only so many tokens of each prompt, the last ones.
            scheduling: how the prompts are treated in the server's queue.
            request_id: under which id they run; by default the server draws one.
            timeout: seconds until the server stops.

        Raises:
            QuireError: the call failed; no vector of it is kept.
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
            response = self._generation.Embed(request, timeout=timeout, metadata=_calls.call_metadata(self._token))
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None
        return _responses.read_embeddings(response)

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
        request = _requests.build_tokenize(text, messages, model=model, add_special_tokens=add_special_tokens)
        try:
            return _responses.read_tokenized(
                self._generation.Tokenize(request, timeout=timeout, metadata=_calls.call_metadata(self._token))
            )
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None

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
        request = _requests.build_detokenize(token_ids, model=model, include_special_tokens=include_special_tokens)
        try:
            return self._generation.Detokenize(
                request, timeout=timeout, metadata=_calls.call_metadata(self._token)
            ).text
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None

    def get_model(self, name: str = "", *, timeout: float | None = None) -> Model:
        """Describes a served model; by default the one that is served.

        Raises:
            QuireError: the call failed.
        """
        request = model_pb2.GetModelRequest(name=name)
        try:
            response = self._models.GetModel(request, timeout=timeout, metadata=_calls.call_metadata(self._token))
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None
        return _responses.read_model(response.model)

    def close(self) -> None:
        """Closes the connection; requests that still run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()
