"""Blocking Python client.

One `Client` is one connection; threads may share it. A `Generation` is one running request: iterate over its deltas,
then read `finished`. Leaving a generation early (`cancel`, the end of a `with` block, or dropping it) cancels the
request on the server.
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

    def __next__(self) -> Delta:
        """Return the next delta.

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
        """Wait for the end; return everything that was not iterated over as one answer.

        Raises:
            QuireError: the request failed.
        """
        return self._events.join(list(self))

    def cancel(self) -> None:
        """Cancel the request; a later `next` raises `CancelledError` unless it has ended."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._call.cancel()


class _Resumed:
    """A `Resume` call with the interface of `Generate`."""

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
    """A `Generate` call that resumes after a lost connection."""

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
            # Do not wait. Without this call, the server would keep the request for this client to resume.
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
        credentials: TLS credentials; without them the connection is not encrypted.
        token: bearer token for authentication.
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
        """Resume a resumable request that another connection or process has started.

        Args:
            request_id: id of the request.
            from_tokens: number of known tokens per choice; they are not sent again.
            from_text_bytes: number of known UTF-8 bytes of text per choice; by default those of the known tokens.
            timeout: seconds until the iteration raises `DeadlineError`.
        """
        request = pb.ResumeRequest(request_id=request_id, from_tokens=from_tokens, from_text_bytes=from_text_bytes)
        call = self._generation.Resume(request, timeout=timeout, metadata=_calls.call_metadata(self._token))
        return Generation(_Resumed(call))

    def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Cancel a resumable request, wherever it runs; the server drops it.

        Raises:
            QuireError: the call failed; `RequestNotFoundError`: the request is unknown.
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
        """Run many requests on one call; yield each answer when it is complete, in any order.

        Args:
            requests: texts, or dicts of options with a text as "prompt".
            progress: print progress to stderr.
            timeout: seconds until the server stops.
            options: options of all requests; a request's own options override them.

        Raises:
            InvalidRequestError: a field cannot hold its value.
            QuireError: the call failed. The error of a single request is in its answer.
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
        """Return the token ids that `generate` would run on.

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
        """Return the text of a token sequence.

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
        """Return the description of a model; empty name: the served model.

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
        """Close the connection; running requests are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()
