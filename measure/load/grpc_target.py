"""A Quire server over gRPC, called through the public package `quire`."""

import contextlib
from itertools import cycle
from typing import Self

import grpc

from measure.load.targets import Answer, Request, RequestCancelledError, RequestFailedError
from quire import errors
from quire.aio import AsyncClient
from quire.types import GenerateOptions, SchedulingOptions


class GrpcTarget:
    """Client for `quire.v1.GenerationService` that uses several connections in turn."""

    def __init__(
        self, target: str, *, credentials: grpc.ChannelCredentials | None = None, token: str = "", connections: int = 1
    ) -> None:
        self._clients = [AsyncClient(target, credentials=credentials, token=token) for _ in range(connections)]
        self._next = cycle(self._clients)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Open all connections."""
        for client in self._clients:
            with contextlib.suppress(errors.QuireError):
                await client.get_model(timeout=10)

    async def stream(self, request: Request, answer: Answer) -> None:
        """Send a request and fill in the response; see `Target`."""
        try:
            await self.call(request, answer)
        except errors.DeadlineError:
            # The deadline was detected by the server or by gRPC, whichever came first.
            raise RequestFailedError("DEADLINE") from None
        except errors.QuireError as error:
            raise RequestFailedError(error.reason or error.code) from None

    async def call(self, request: Request, answer: Answer) -> None:
        """Send a request and fill in the answer, as `stream` does.

        Raises:
            QuireError: the server failed, refused, or did not answer in time.
            RequestCancelledError: the request was cancelled because of `cancel_after`.
        """
        options = GenerateOptions(
            max_tokens=request.max_tokens, temperature=request.temperature, ignore_eos=request.ignore_eos
        )
        if request.scheduling is not None:
            options["scheduling"] = request.scheduling
        elif request.tenant or request.priority:
            options["scheduling"] = SchedulingOptions(priority=request.priority, tenant=request.tenant)
        text = None
        match request.prompt:
            case str():
                text = request.prompt
            case (dict(), *_):
                options["messages"] = [message for message in request.prompt if isinstance(message, dict)]
            case _:
                options["token_ids"] = [token for token in request.prompt if isinstance(token, int)]
        with_answer = request.keeps_answer
        # Leaving the block early cancels the request on the server.
        async with next(self._next).generate(text, timeout=request.timeout_s, **options) as generation:
            async for delta in generation:
                if delta.token_ids:
                    answer.take(len(delta.token_ids), delta.text, delta.token_ids, keep=with_answer)
                elif with_answer:
                    answer.text.append(delta.text)
                if request.cancel_after is not None and answer.output_tokens >= request.cancel_after:
                    raise RequestCancelledError
        finished = generation.finished
        if finished is not None:
            answer.prompt_tokens = finished.usage.prompt_tokens
            answer.cached_tokens = finished.usage.cached_prompt_tokens
            answer.output_tokens = finished.usage.completion_tokens

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.close()
