"""Cost of tracing: a whole service without tracing, with 1 % and with 100 % of requests sampled, in turn.

    python -m measure.frontend.tracing [--rounds N] [--seconds S] [--streams N] [--json FILE]

Three services run, but only one at a time has load. Each has its own front end, scheduler, recorder and a worker with
the bundled model. All export to a collector in this process. The results are CPU time per token for all processes of a
service, and tokens per second, each relative to the service without tracing in the same round. The bundled model
computes little, so tracing costs relatively more than with a real model. Linux only: the program reads /proc.

Targets: at most 1.02 times the CPU time at 1 %, and at most 1.05 times at 100 %.
"""

import argparse
import itertools
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from measure.frontend.child import PATIENCE_S, Child
from measure.spread import median_and_range

SHARES = (0.0, 0.01, 1.0)
"""Fraction of sampled requests; 0 disables tracing."""
MAX_TOKENS = 128
"""Output tokens per request."""
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class _Figures:
    cpu_us_per_token: float
    tokens_per_s: float


class _Service:
    """A running service."""

    def __init__(self, child: Child) -> None:
        self._child = child
        _, grpc_part, http_part = child.line(_START_S).split()
        self._target = grpc_part.removeprefix("grpc=")
        self._http = http_part.removeprefix("http=")

    def measure(self, folder: Path, streams: int, seconds: float) -> _Figures:
        arguments = (f"--target={self._target}", f"--streams={streams}", f"--max-tokens={MAX_TOKENS}")
        with Child(folder, "measure.frontend.client", *arguments, f"--seconds={seconds}", "--warmup-s=1") as client:
            client.line()
            before = self._child.tree_cpu_seconds()
            counts: dict[str, float] = json.loads(client.line(seconds + PATIENCE_S))
            cpu = self._child.tree_cpu_seconds() - before
        tokens = counts["tokens_per_s"] * counts["messages"] / counts["messages_per_s"]
        return _Figures(cpu / tokens * 1e6, counts["tokens_per_s"])

    def spans_dropped(self) -> float:
        """Return the number of spans that the front end and the scheduler have dropped."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self._http}/metrics", timeout=PATIENCE_S) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("quire_spans_dropped_total"))


def run_bench(*, rounds: int, seconds: float, streams: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name, ExitStack() as processes:
        folder = Path(name)
        endpoint = processes.enter_context(_collector())
        services = {share: _Service(processes.enter_context(_serve(folder, share, endpoint))) for share in SHARES}
        found: dict[float, list[_Figures]] = {share: [] for share in SHARES}
        for number in range(rounds):
            for share in SHARES[number % len(SHARES) :] + SHARES[: number % len(SHARES)]:
                found[share].append(services[share].measure(folder, streams, seconds))
        dropped = {share: service.spans_dropped() for share, service in services.items()}
    return {
        "streams": streams,
        "rounds": rounds,
        "results": [_result(share, found[share], found[0.0], dropped[share]) for share in SHARES],
    }


def _result(share: float, found: Sequence[_Figures], off: Sequence[_Figures], dropped: float) -> dict[str, Any]:
    pairs = list(zip(found, off, strict=True))
    return {
        "sampled": share,
        "cpu_us_per_token": median_and_range([each.cpu_us_per_token for each in found], 4),
        "cpu_to_off": median_and_range([each.cpu_us_per_token / base.cpu_us_per_token for each, base in pairs], 4),
        "tokens_per_s": median_and_range([each.tokens_per_s for each in found], 4),
        "tokens_to_off": median_and_range([each.tokens_per_s / base.tokens_per_s for each, base in pairs], 4),
        "spans_dropped": dropped,
    }


def _serve(folder: Path, share: float, endpoint: str) -> Child:
    own = folder / f"service-{share:g}"
    own.mkdir()
    environ = {}
    if share:
        environ = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(share),
        }
    return Child(
        own, "quire_server.cli.main", "serve", "--model=demo", "--grpc-port=0", "--http-port=0", "--grace-period-s=0",
        f"--record-dir={own / 'record'}", environ=environ,
    )  # fmt: skip


@contextmanager
def _collector() -> Iterator[str]:
    """Run a collector that discards all data; yield its endpoint."""

    class Discard(grpc.GenericRpcHandler):
        def service(self, _details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
            return grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Discard()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['streams']} streams, {result['rounds']} rounds: median (min .. max)")
    for row in result["results"]:
        print(f"{row['sampled']:.0%} of the requests sampled, {row['spans_dropped']:g} spans dropped:")
        for name, value in itertools.islice(row.items(), 1, 5):
            print(f"  {name:18} {value['median']:12.3f}  ({value['min']:.3f} .. {value['max']:.3f})")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m measure.frontend.tracing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    result = run_bench(rounds=options.rounds, seconds=options.seconds, streams=options.streams)
    _print_table(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
