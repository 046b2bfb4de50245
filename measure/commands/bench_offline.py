"""Runs a fixed list of token-id requests through the real three processes and writes tokens and timings.

Each line of --requests is a JSON object {"prompt_token_ids": […], "max_tokens": N} with, optionally, "ignore_eos" (true
or false), "arrive_s" (seconds after the start; default 0) and "prime" (true: served first, untimed). At most
--max-concurrency requests are in flight. Decoding is greedy.

The result holds tokens and times per line of the input, in its order; times are seconds since the start, one per token,
as the client received it ("prime" lines have none). TTFT counts from sending the request. cpu_s is the CPU time that
each process used during the run. Accepts all flags of quire serve.
"""

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.cli.serve import add_serve_flags, serve_config
from shared.logging import configure_logging

if TYPE_CHECKING:
    from measure.offline import OfflineRequest, Report
    from quire_server.serve.layout import ServeConfig

EXAMPLES = """
  quire bench offline --model demo --requests tokens.jsonl --max-concurrency 32 --json result.json
"""


def configure(parser: OneLineParser) -> None:
    """Add the benchmark's flags and those of `quire serve`."""
    add_serve_flags(parser)
    # Use free ports by default, because other services may run on this machine. Servers are compared with the same
    # options, so ignore the model's own sampling defaults.
    parser.set_defaults(grpc_port=0, http_port=0, generation_config="none")
    add = parser.add_argument
    add("--requests", type=Path, required=True, metavar="FILE", help="file of requests, one JSON object per line")
    add(
        "--max-concurrency",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of requests in flight (default: 64)",
    )
    add("--json", type=Path, metavar="FILE", help="write the result to this file (default: stdout)")


def run(options: Namespace) -> int:
    """Start a service, send the requests and write the result."""
    from measure.offline import read_requests
    from quire_server.serve.service import fetch_model

    if options.max_concurrency < 1:
        raise CommandError(f"--max-concurrency: {options.max_concurrency} is too small; use at least 1")
    requests = read_requests(options.requests)
    configure_logging("quire-bench", level="warning")
    config = serve_config(options)
    fetch_model(config)
    report = asyncio.run(_measure(config, requests, options.max_concurrency))
    if options.json is None:
        print(report.to_json())
    else:
        options.json.write_text(report.to_json() + "\n", "utf-8")
        print(report.summary(), file=sys.stderr)
    return 0


async def _measure(config: "ServeConfig", requests: "list[OfflineRequest]", max_concurrency: int) -> "Report":
    from measure.load.grpc_target import GrpcTarget
    from measure.offline import run_requests
    from quire_server.serve.service import Service

    task = asyncio.current_task()
    assert task is not None
    # Stop the service first and then the command, as Ctrl-C does.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with Service(config, log_level="warning") as service:
        addresses = await service.start()
        async with GrpcTarget(addresses.grpc) as target:
            return await run_requests(target, requests, max_concurrency, cpu_seconds=service.cpu_seconds)
