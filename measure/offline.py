"""Offline benchmark: sends a fixed list of requests and records when each token arrives.

If all requests arrive at 0, this is a closed loop, which the concurrency limit paces. If requests have arrival times,
it is an open loop. Reading and reporting are pure; only `run_requests` communicates with a server.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from measure.load.grpc_target import GrpcTarget
from measure.load.targets import Answer, Request
from measure.load.workloads import read_json_lines
from measure.spread import Spread
from shared.config import ConfigError

_KEYS = frozenset({"prompt_token_ids", "max_tokens", "ignore_eos", "arrive_s", "prime"})
_IN_BATCHES = frozenset({"prompt", "messages", "body"})
"""Request fields in a `quire batch` file."""


@dataclass(frozen=True, slots=True)
class OfflineRequest(Request):
    """One line of the input."""

    ignore_eos: bool = False
    keeps_answer: bool = True
    arrive_s: float = 0.0
    prime: bool = False
    """Whether the request is served before the clock starts, to fill caches."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Tokens and times of one request."""

    sent_s: float
    """Time of sending, seconds since the start."""
    tokens: tuple[int, ...]
    times_s: tuple[float, ...]
    """Arrival time of each token, seconds since the start; tokens in one message share a time."""


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a run: one trace per request, in input order."""

    requests: tuple[OfflineRequest, ...]
    traces: tuple[Trace, ...]
    wall_s: float
    cpu_s: Mapping[str, float]
    """CPU time of each service process during the run in seconds, by name; empty if not measured."""

    def to_json(self) -> str:
        """Return the report as the JSON object that `quire bench offline --help` describes."""
        return json.dumps(
            {
                "out_tokens": self._out_tokens(),
                "wall_s": self.wall_s,
                "out_tok_per_s": self._out_tokens() / self.wall_s if self.wall_s else 0.0,
                "ttft_s": Spread.of(self._ttfts()).named("p50", "p99"),
                "itl_s": Spread.of(self._itls()).named("p50", "p99", "max"),
                "requests": len(self._timed()),
                "cpu_s": dict(self.cpu_s),
                "tokens": [trace.tokens for trace in self.traces],
                "times": [
                    () if request.prime else trace.times_s
                    for request, trace in zip(self.requests, self.traces, strict=True)
                ],
            }
        )

    def summary(self) -> str:
        ttft = Spread.of(self._ttfts()).named("p50", "p99")
        itl = Spread.of(self._itls()).named("p50", "p99")
        return (
            f"{self._out_tokens()} tokens of {len(self._timed())} requests in {self.wall_s:.2f} s:"
            f" {self._out_tokens() / self.wall_s if self.wall_s else 0.0:.1f} tokens/s,"
            f" TTFT p50 {ttft['p50']:.3f} s p99 {ttft['p99']:.3f} s,"
            f" ITL p50 {itl['p50'] * 1e3:.1f} ms p99 {itl['p99'] * 1e3:.1f} ms"
        )

    def _timed(self) -> list[Trace]:
        return [trace for request, trace in zip(self.requests, self.traces, strict=True) if not request.prime]

    def _out_tokens(self) -> int:
        return sum(len(trace.tokens) for trace in self._timed())

    def _ttfts(self) -> list[float]:
        return [trace.times_s[0] - trace.sent_s for trace in self._timed() if trace.times_s]

    def _itls(self) -> list[float]:
        return [gap for trace in self._timed() for gap in np.diff(trace.times_s).tolist()]


def read_requests(path: Path) -> list[OfflineRequest]:
    """Read the requests of a JSONL file.

    Raises:
        ConfigError: the file does not exist, or a line is not a valid request; the message names the line.
    """
    return [_parse(values, where) for where, values in read_json_lines(path, "--requests: ")]


async def run_requests(
    target: GrpcTarget,
    requests: Sequence[OfflineRequest],
    max_concurrency: int,
    *,
    cpu_seconds: Callable[[], Mapping[str, float]] = dict,
) -> Report:
    """Send every request at its time, at most `max_concurrency` at once.

    Args:
        target: the server.
        requests: the requests.
        max_concurrency: maximum number of requests in flight.
        cpu_seconds: returns each process's CPU time, by name; called before and after the run.

    Raises:
        QuireError: a request failed; an incomplete benchmark has no meaning.
    """
    primes = {
        index: await send(target, request, time.perf_counter())
        for index, request in enumerate(requests)
        if request.prime
    }
    free = asyncio.Semaphore(max_concurrency)
    before = cpu_seconds()
    start = time.perf_counter()

    async def one(request: OfflineRequest) -> Trace:
        await asyncio.sleep(start + request.arrive_s - time.perf_counter())
        async with free:
            return await send(target, request, start)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = {i: group.create_task(one(request)) for i, request in enumerate(requests) if not request.prime}
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # The other requests were cancelled or failed as well.
    wall_s = time.perf_counter() - start
    cpu_s = {name: used - before.get(name, 0.0) for name, used in cpu_seconds().items()}
    traces = primes | {index: task.result() for index, task in tasks.items()}
    return Report(tuple(requests), tuple(traces[index] for index in range(len(requests))), wall_s, cpu_s)


async def send(target: GrpcTarget, request: Request, start: float) -> Trace:
    """Send a request and return its trace, seconds since `start`.

    Raises:
        QuireError: the request failed.
    """
    times_s: list[float] = []
    answer = Answer()
    answer.on_tokens = lambda count: times_s.extend([answer.message_times[-1] - start] * count)
    sent_s = time.perf_counter() - start
    await target.call(request, answer)
    return Trace(sent_s, tuple(answer.token_ids), tuple(times_s))


def _parse(values: Any, where: str) -> OfflineRequest:
    if not isinstance(values, dict) or not {"prompt_token_ids", "max_tokens"} <= set(values):
        hint = (
            "; this looks like a file of quire batch" if isinstance(values, dict) and _IN_BATCHES & set(values) else ""
        )
        raise ConfigError(f"{where}: must be an object with prompt_token_ids and max_tokens{hint}")
    if unknown := set(values) - _KEYS:
        raise ConfigError(f"{where}: unknown field {sorted(unknown)[0]!r}; use {', '.join(sorted(_KEYS))}")
    try:
        return OfflineRequest(
            prompt=tuple(int(token) for token in values["prompt_token_ids"]),
            max_tokens=int(values["max_tokens"]),
            ignore_eos=bool(values.get("ignore_eos", False)),
            arrive_s=float(values.get("arrive_s", 0.0)),
            prime=bool(values.get("prime", False)),
        )
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: a field has the wrong type; see quire bench offline --help") from None
