"""The most load that the generator in `quire bench serve` can make: the rate at which it is late by more than 1 ms.

    python -m measure.studies.generator_limit [--tokens N] [--processes N] [--seconds S] [--json FILE]

Two bare servers in processes of their own answer each request with N tokens, one every 10 ms: an HTTP server that
writes ready-made bytes, and a bare grpc.aio server. The rate grows by a quarter until the 99th percentile of the
generator's delay, or that of its event loop, exceeds 1 ms. Give it cores that do nothing else.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import uvloop

from measure.frontend.child import Child
from measure.frontend.servicer_bare_echo import BareEcho
from measure.load.arrivals import Gamma
from measure.load.figures import Slo
from measure.load.plan import Address, Plan
from measure.load.run import LATE_S, Run, run_plan
from measure.load.workloads import Drawn, Lengths
from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from services.grpc.boundary import Context

FIRST_RATE, GROWTH = 10.0, 1.25
GAP_S = 0.01
"""Time between two tokens in a response. Without it, each response would be one burst, which no real server sends."""


async def serve_http() -> None:
    """Respond to each completion with as many events as the requested tokens."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    token = _chunk({"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
    end = _chunk({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}) + b"0\r\n\r\n"

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length")), 0)
                body = json.loads(await reader.readexactly(length) or b"{}")
                writer.write(head)
                for _ in range(body.get("max_tokens", 0)):
                    writer.write(token)
                    await asyncio.sleep(GAP_S)
                writer.write(end)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(f"listening http=127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await stopping.wait()


def _chunk(event: dict[str, object]) -> bytes:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class CompleteEcho(BareEcho):
    """The bare echo, followed by the final message that the client expects."""

    async def Generate(self, request: v1.GenerateRequest, context: Context) -> AsyncIterator[v1.GenerateResponse]:
        """Stream one message per token, then the end."""
        async for response in super().Generate(request, context):
            await asyncio.sleep(GAP_S)
            yield response
        end = v1.Finished(reason=v1.FINISH_REASON_LENGTH)
        end.usage.completion_tokens = request.stop.max_tokens
        yield v1.GenerateResponse(finished=end)


async def serve_grpc() -> None:
    """Respond to each call with as many messages as the requested tokens."""
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(CompleteEcho(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening grpc=127.0.0.1:{port}", flush=True)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await stopping.wait()
    await server.stop(0)


async def limit(address: Address, tokens: int, processes: int, seconds: float) -> tuple[Run, Run] | None:
    """Return the last run without delay and the first late one; the former is None if even the first run is late."""
    good = None
    rate, workload = FIRST_RATE, Drawn(Lengths.fixed(64), Lengths.fixed(tokens))
    while rate < 100_000:
        plan = Plan(address, Gamma(rate), workload, warmup_s=0.5, duration_s=seconds, max_in_flight=4096)
        run = await run_plan(plan, Slo(), processes=processes)
        print(
            f"  {run.figures.request_rate:,.0f} requests/s, {run.figures.output_rate:,.0f} tokens/s: sending"
            f" {1000 * run.figures.late.p99:.2f} ms late, event loop {1000 * run.loop_late.p99:.2f} ms (p99),"
            f" {1e6 * run.cpu_s / max(run.figures.output_tokens, 1):.0f} µs of CPU per token",
            flush=True,
        )
        if max(run.figures.late.p99, run.loop_late.p99) > LATE_S or run.figures.failed:
            return None if good is None else (good, run)
        good, rate = run, rate * GROWTH
    return None


SERVERS = {"http": serve_http, "grpc": serve_grpc}


def main() -> int:
    """Measure both protocols."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a request (default: 64)")
    parser.add_argument("--processes", type=int, default=1, help="generating processes (default: 1)")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each rate (default: 5)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(SERVERS[options.serve]())
        return 0
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Child(Path(folder), "measure.studies.generator_limit", "--serve=http") as http,
        Child(Path(folder), "measure.studies.generator_limit", "--serve=grpc") as rpc,
    ):
        addresses = {
            "http": Address(url=f"http://{http.line().split('=')[1].strip()}"),
            "grpc": Address(grpc=rpc.line().split("=")[1].strip()),
        }
        for protocol, address in addresses.items():
            print(f"{protocol}, {options.tokens} tokens, {options.processes} processes", flush=True)
            found = uvloop.run(limit(address, options.tokens, options.processes, options.seconds))
            figures = found[0].figures if found is not None else None
            results.append(
                {
                    "protocol": protocol,
                    "tokens": options.tokens,
                    "processes": options.processes,
                    "requests_per_s": figures.request_rate if figures is not None else None,
                    "tokens_per_s": figures.output_rate if figures is not None else None,
                }
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
