"""The client processes of `quire bench frontend`: many streams on one channel, counting what arrives.

Prints one line when its streams run, then counts for the given time and prints a line of JSON.
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

Call: TypeAlias = "aio.UnaryStreamCall[v1.GenerateRequest, v1.GenerateResponse]"
Stub: TypeAlias = "generation_pb2_grpc.GenerationServiceAsyncStub"


@dataclass(slots=True)
class Counts:
    """What arrived."""

    messages: int = 0
    tokens: int = 0


async def _read(call: Call, counts: Counts) -> None:
    """Takes everything at once."""
    while isinstance(response := await call.read(), v1.GenerateResponse):
        counts.messages += 1
        counts.tokens += len(response.delta.token_ids)


async def _read_again_and_again(stub: Stub, call: Call, counts: Counts, max_tokens: int) -> None:
    """A reader that asks again when its answer is complete."""
    while True:
        await _read(call, counts)
        call = stub.Generate(_request(max_tokens))


async def _until_served(stub: Stub) -> None:
    """Waits until the server answers: a front end refuses calls until it has heard of its core."""
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


async def _measure(options: argparse.Namespace) -> dict[str, float]:
    counts = Counts()
    async with aio.insecure_channel(options.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await _until_served(stub)
        calls = [stub.Generate(_request(options.max_tokens)) for _ in range(options.streams + options.stalled)]
        # Measured from when every stream runs; the calls beyond `streams` are never read again.
        await asyncio.gather(*(call.read() for call in calls))
        tasks = [
            asyncio.create_task(_read_again_and_again(stub, call, counts, options.max_tokens))
            for call in calls[: options.streams]
        ]
        await asyncio.sleep(options.warmup_s)
        print("running", flush=True)
        before, begin, cpu = Counts(counts.messages, counts.tokens), time.perf_counter(), time.process_time()
        await asyncio.sleep(options.seconds)
        elapsed = time.perf_counter() - begin
        result = {
            "messages_per_s": (counts.messages - before.messages) / elapsed,
            "tokens_per_s": (counts.tokens - before.tokens) / elapsed,
            "client_cpu_share": (time.process_time() - cpu) / elapsed,
        }
        for task in tasks:
            if task.done():
                task.result()  # readers never end by themselves: this raises
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return result


def main(arguments: list[str]) -> int:
    """Measures once."""
    parser = argparse.ArgumentParser(prog="python -m services.bench_client", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--stalled", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1_000_000)
    parser.add_argument("--warmup-s", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(_measure(options))), flush=True)
    except grpc.RpcError as error:
        print(f"bench client: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
