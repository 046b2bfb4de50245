"""Client process for `quire bench frontend`: keeps many streams open on one channel and counts messages.

The process prints a line when its streams run. It counts for the given time, or for a multiple of it until enough
messages have arrived. Then it prints a line of JSON. It exits with an error if this takes too long.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from typing import TypeAlias

import grpc
import uvloop
from grpc import aio

from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc

MIN_MESSAGES = 100
"""Minimum number of messages in a measurement; fewer give no reliable rate."""
PATIENCE_S = 60.0
"""Maximum time beyond warm-up and measurement, seconds."""
UNLIMITED = 1_000_000

Call: TypeAlias = "aio.UnaryStreamCall[v1.GenerateRequest, v1.GenerateResponse]"
Stub: TypeAlias = "generation_pb2_grpc.GenerationServiceAsyncStub"


@dataclass(slots=True)
class Counts:
    """Numbers of received messages and tokens."""

    messages: int = 0
    tokens: int = 0


async def _read(call: Call, counts: Counts) -> None:
    """Read one stream to its end."""
    while isinstance(response := await call.read(), v1.GenerateResponse):
        counts.messages += 1
        counts.tokens += len(response.delta.token_ids)


async def _read_repeatedly(stub: Stub, call: Call, counts: Counts, max_tokens: int) -> None:
    """Send a new request whenever the last response is complete."""
    while True:
        await _read(call, counts)
        call = stub.Generate(_request(max_tokens))


async def _until_served(stub: Stub) -> None:
    """Wait until the server responds. A front end rejects calls until it is connected to its core."""
    while True:
        try:
            async for _ in stub.Generate(_request(1)):
                pass
            return
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.05)


def _request(max_tokens: int) -> v1.GenerateRequest:
    return v1.GenerateRequest(
        token_ids=v1.TokenIds(ids=range(300, 364)),
        stop=v1.StopOptions(max_tokens=max_tokens, ignore_eos=True),
    )


async def _measure(options: argparse.Namespace) -> None:
    # Disable BDP probing. With probing, gRPC buffers megabytes for a stalled client instead of 64 KiB.
    channel_options = [("grpc.enable_http_proxy", 0), *([("grpc.http2.bdp_probe", 0)] if options.stalled else [])]
    async with aio.insecure_channel(options.target, options=channel_options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await _until_served(stub)
        stalled = [stub.Generate(_request(UNLIMITED)) for _ in range(options.stalled)]
        calls = [stub.Generate(_request(options.max_tokens)) for _ in range(options.streams)]
        # The measurement begins when every stream runs. From then on, stalled streams are not read.
        await asyncio.gather(*(call.read() for call in stalled + calls))
        counts = Counts()
        async with (
            asyncio.TaskGroup() as readers
        ):  # A failing reader cancels all others. Otherwise they run until they are cancelled.
            tasks = [readers.create_task(_read_repeatedly(stub, call, counts, options.max_tokens)) for call in calls]
            await asyncio.sleep(options.warmup_s)
            print("running", flush=True)
            print(json.dumps(await _count(counts, options.seconds)), flush=True)
            for task in tasks:
                task.cancel()


async def _count(counts: Counts, seconds: float) -> dict[str, float]:
    """Return the counts and rates in a window of this length, or longer if few messages arrive."""
    before, begin, cpu = Counts(counts.messages, counts.tokens), time.perf_counter(), time.process_time()
    messages = 0
    while messages < MIN_MESSAGES:
        await asyncio.sleep(seconds)
        messages = counts.messages - before.messages
    elapsed = time.perf_counter() - begin
    return {
        "messages": messages,
        "messages_per_s": messages / elapsed,
        "tokens_per_s": (counts.tokens - before.tokens) / elapsed,
        "client_cpu_share": (time.process_time() - cpu) / elapsed,
    }


async def _measure_in_time(options: argparse.Namespace) -> None:
    async with asyncio.timeout(options.warmup_s + options.seconds + PATIENCE_S):
        await _measure(options)


def main(arguments: list[str]) -> int:
    """Run one measurement."""
    parser = argparse.ArgumentParser(prog="python -m measure.frontend.client", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--stalled", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=UNLIMITED)
    parser.add_argument("--warmup-s", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_measure_in_time(options))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
