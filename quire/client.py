"""Blocking Python client.

One `Client` is one connection; threads may share it. Do not edit this module: `python -m tools.sync_client` makes it
from `quire/aio.py`.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack

import grpc

from quire import _calls, _requests, _responses, errors
from quire._batch import BatchAnswers
from quire._calls_sync import Connection, Flag, Stream, UnaryMethod, send
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

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")


class _Responses(Protocol):
    """The responses to a `Generate` call, which may be a plain, resumed or resumable call."""

    def read(self) -> pb.GenerateResponse | None: ...
    def cancel(self) -> bool: ...


class Generation(Iterator[Delta]):
    """A running request: an iterator of deltas, then a `finished` result.

    Leaving it early (`cancel`, or the end of a `with` block) cancels the request on the server.
    """

    def __init__(self, responses: _Responses, *, parsed: bool | None = None) -> None:
        """Wrap the responses. `parsed` is whether parts replace texts; None uses parts as soon as there are any."""
        self._responses = responses
        self._events = _responses.Events(parsed=parsed)

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
        """The choices that have finished so far, by index, if n > 1."""
        return self._events.choices

    def __next__(self) -> Delta:
        """Return the next delta.

        Raises:
            QuireError: the request failed; the class shows why.
        """
        while (response := self._responses.read()) is not None:
            delta = self._events.take(response)
            if delta is not None:
                return delta
        _responses.require_finished(self.finished)
        raise StopIteration

    def result(self) -> Completion:
        """Wait for the end; return all output that was not iterated over as one response.

        Raises:
            QuireError: the request failed.
        """
        return self._events.join(list(self))

    def cancel(self) -> None:
        """Cancel the request; unless the request has ended, a later iteration raises `CancelledError`."""
        self._responses.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.cancel()


class _Resumed:
    """A `Resume` call with the interface of `Generate`."""

    def __init__(self, stream: Stream[pb.ResumeResponse]) -> None:
        self._stream = stream

    def read(self) -> pb.GenerateResponse | None:
        response = self._stream.read()
        return None if response is None else response.response

    def cancel(self) -> bool:
        return self._stream.cancel()


class _Resumable:
    """A `Generate` call that resumes after a lost connection."""

    def __init__(self, connection: Connection, request: pb.GenerateRequest, timeout: float | None) -> None:
        self._connection = connection
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._resumption = Resumption(request)
        self._lock = threading.Lock()
        """Guards the current call: another thread may cancel while this thread reconnects."""
        self._cancelled = Flag()
        self._responses: _Responses = self._generate(timeout)

    def read(self) -> pb.GenerateResponse | None:
        while True:
            try:
                response = self._responses.read()
            except errors.QuireError as error:
                wait_s = self._resumption.failed(error)
                if wait_s is None or self._cancelled.wait(wait_s):
                    raise
                self._try_again()
            else:
                if response is not None:
                    self._resumption.received(response)
                return response

    def cancel(self) -> bool:
        with self._lock:
            self._cancelled.set()
            cancelled = self._responses.cancel()
        if cancelled:
            # Without this call, the server would retain the request for this client to resume.
            request = pb.CancelRequest(request_id=self._resumption.request.request_id)
            send(self._connection.generation.Cancel, request, timeout=5, metadata=self._connection.metadata())
        return cancelled

    def _generate(self, timeout: float | None) -> _Responses:
        call = self._connection.generation.Generate(
            self._resumption.request, timeout=timeout, metadata=self._connection.metadata()
        )
        return Stream[pb.GenerateResponse](call)

    def _try_again(self) -> None:
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.001)
        with self._lock:
            if self._cancelled.is_set():
                return
            if self._resumption.sends_again:
                self._responses = self._generate(left)
            else:
                resume = self._resumption.resume_request()
                call = self._connection.generation.Resume(resume, timeout=left, metadata=self._connection.metadata())
                self._responses = _Resumed(Stream(call))


class Client:
    """A connection to a Quire server.

    Args:
        target: "HOST:PORT" of the gRPC listener, or any other gRPC target.
        credentials: TLS credentials; without them the connection is not encrypted.
        token: bearer token for authentication.
    """

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None, token: str = "") -> None:
        self._connection = Connection(target, credentials, token)

    def generate(
        self, prompt: str | None = None, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Start generating from a text, from `messages=[…]` or from `token_ids=[…]`.

        Args:
            prompt: the text to continue.
            timeout: seconds until the server stops and the iteration raises `DeadlineError`.
            options: see `quire.GenerateOptions`.

        Raises:
            TypeError: an option does not exist.
            InvalidRequestError: a field cannot hold its value. All other errors are raised while iterating.
        """
        _requests.check_options(options)
        timeout = _requests.check_timeout(timeout)
        request = _requests.build_generate(prompt, **options)
        if request.resumable:
            return Generation(_Resumable(self._connection, request, timeout), parsed=request.output.parse)
        call = self._connection.generation.Generate(request, timeout=timeout, metadata=self._connection.metadata())
        return Generation(Stream(call), parsed=request.output.parse)

    def resume(
        self,
        request_id: str,
        *,
        from_tokens: Sequence[int] = (),
        from_text_bytes: Sequence[int] = (),
        from_part_bytes: Sequence[int] = (),
        timeout: float | None = None,
    ) -> Generation:
        """Resume a resumable request that another connection or process has started.

        Args:
            request_id: id of the request.
            from_tokens: number of known tokens per choice, which are not sent again.
            from_text_bytes: number of known UTF-8 text bytes per choice; by default the bytes of the known tokens.
            from_part_bytes: size of the known parts per choice, see the proto; by default the parts of the known text.
            timeout: seconds until the iteration raises `DeadlineError`.
        """
        timeout = _requests.check_timeout(timeout)
        request = pb.ResumeRequest(
            request_id=request_id,
            from_tokens=from_tokens,
            from_text_bytes=from_text_bytes,
            from_part_bytes=from_part_bytes,
        )
        call = self._connection.generation.Resume(request, timeout=timeout, metadata=self._connection.metadata())
        return Generation(_Resumed(Stream(call)))

    def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Cancel a resumable request on any front end; the server drops it.

        Raises:
            QuireError: the call failed; `RequestNotFoundError`: the request is unknown.
        """
        self._ask(self._connection.generation.Cancel, pb.CancelRequest(request_id=request_id), timeout)

    def generate_batch(
        self,
        requests: Iterable[str | Mapping[str, Any]],
        *,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[BatchAnswer]:
        """Run many requests in one call; yield each response when it is complete, in any order.

        Args:
            requests: texts, or dicts of options with a text as "prompt".
            progress: print progress to stderr.
            timeout: seconds until the server stops.
            options: options for all requests; a request's own options override them.

        Raises:
            TypeError: `options` has an unknown option.
            QuireError: the call failed. The error for a single request is in its answer.
        """
        timeout = _requests.check_timeout(timeout)
        answers = BatchAnswers(requests, options, progress)
        call = self._connection.generation.GenerateBatch(
            answers.messages(), timeout=timeout, metadata=self._connection.metadata()
        )
        return self._read_batch(Stream(call), answers)

    @staticmethod
    def _read_batch(stream: Stream[pb.GenerateBatchResponse], answers: BatchAnswers) -> Iterator[BatchAnswer]:
        yield from answers.invalid()
        while (response := stream.read()) is not None:
            answer = answers.take(response)
            if answer is not None:
                yield answer

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
            model: name of the model; empty for the served model.
            pooling: "last" uses the hidden state of the last token, "mean" the mean over all tokens.
            normalize: scale vectors to length 1.
            truncate_prompt_tokens: keep only this many last tokens of each prompt.
            scheduling: scheduling options for the prompts.
            request_id: id of the request; empty to let the server choose.
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
        return _responses.read_embeddings(self._ask(self._connection.generation.Embed, request, timeout))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> Tokenized:
        """Return the token ids that `generate` would use as the prompt.

        Raises:
            QuireError: the call failed.
        """
        request = _requests.build_tokenize(text, messages, model=model, add_special_tokens=add_special_tokens)
        return _responses.read_tokenized(self._ask(self._connection.generation.Tokenize, request, timeout))

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
        return (self._ask(self._connection.generation.Detokenize, request, timeout)).text

    def get_model(self, name: str = "", *, timeout: float | None = None) -> Model:
        """Return a model's description; an empty name means the served model.

        Raises:
            QuireError: the call failed.
        """
        response = self._ask(self._connection.models.GetModel, model_pb2.GetModelRequest(name=name), timeout)
        return _responses.read_model(response.model)

    def _ask(
        self, method: "UnaryMethod[_RequestT, _ResponseT]", request: _RequestT, timeout: float | None
    ) -> _ResponseT:
        timeout = _requests.check_timeout(timeout)
        try:
            return method(request, timeout=timeout, metadata=self._connection.metadata())
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None

    def close(self) -> None:
        """Close the connection; running requests are cancelled."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()
