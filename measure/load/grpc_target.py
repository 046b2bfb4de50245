"""A Quire server over gRPC, through the package `quire` that its users have."""

import contextlib
from itertools import cycle

import grpc

from measure.load.targets import Answer, Request, RequestCancelledError, RequestFailedError
from quire import errors
from quire.aio import AsyncClient
from quire.types import GenerateOptions, SchedulingOptions


class GrpcTarget:
    """Calls of `quire.v1.GenerationService`, spread over several connections in turn."""

    def __init__(
        self, target: str, *, credentials: grpc.ChannelCredentials | None = None, token: str = "", connections: int = 1
    ) -> None:
        self._clients = [AsyncClient(target, credentials=credentials, token=token) for _ in range(connections)]
        self._next = cycle(self._clients)

    async def connect(self) -> None:
        """Open all connections."""
        for client in self._clients:
            with contextlib.suppress(errors.QuireError):
                await client.get_model(timeout=10)

    async def stream(self, request: Request, answer: Answer) -> None:
        """Send a request and fill in the answer; see `Target`."""
        options = GenerateOptions(
            max_tokens=request.max_tokens, temperature=request.temperature, ignore_eos=request.ignore_eos
        )
        if request.tenant or request.priority:
            options["scheduling"] = SchedulingOptions(priority=request.priority, tenant=request.tenant)
        text = None
        match request.prompt:
            case str():
                text = request.prompt
            case (int(), *_):
                options["token_ids"] = [token for token in request.prompt if isinstance(token, int)]
            case _:
                options["messages"] = [message for message in request.prompt if isinstance(message, dict)]
        try:
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
        except errors.DeadlineError:
            raise RequestFailedError("DEADLINE") from None  # found by the server or by gRPC, in either order
        except errors.QuireError as error:
            raise RequestFailedError(error.reason or error.code) from None
        if finished is not None:
            answer.prompt_tokens = finished.usage.prompt_tokens
            answer.cached_tokens = finished.usage.cached_prompt_tokens
            answer.output_tokens = finished.usage.completion_tokens

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.close()
