"""Baseline of `quire bench frontend`: a grpc.aio server that only streams messages.

The service, the messages and the event loop are the same as in the front end. There is one message per token and no
core.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

import uvloop
from grpc import aio

from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from services.grpc.boundary import Context


class BareEcho(generation_pb2_grpc.GenerationServiceServicer):
    """Servicer whose Generate repeats the prompt's tokens."""

    async def Generate(self, request: v1.GenerateRequest, context: Context) -> AsyncIterator[v1.GenerateResponse]:
        """Stream one message per token."""
        prompt = list(request.token_ids.ids)
        for index in range(request.stop.max_tokens):
            response = v1.GenerateResponse()
            delta = response.delta
            delta.first_index = index
            delta.token_ids.append(prompt[index % len(prompt)])
            delta.text = " word"
            yield response


async def _serve() -> None:
    server = aio.server()
    echo = BareEcho()  # type: ignore[abstract]  # the rest is not measured
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(echo, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening grpc=127.0.0.1:{port}", flush=True)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await stopping.wait()
    await server.stop(0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
    sys.exit(0)
