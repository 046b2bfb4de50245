"""A mixed load of many requests while workers and the scheduler are killed, checked against the flight record.

    python -m checks.chaos.mixed --requests 10000 --json build/chaos-record.json

The client measures each request from the call to the end of its stream, and the front end logs its own time. The causes
reported by `quire explain` must sum to both. The client's time also includes the transport and the wait for the front
end's handler, which are not measured. The load therefore keeps the workers busy and not the front end.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc import RpcError, aio

from checks.chaos.command import parser, tell
from measure.spread import Spread
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from measure.testbed.service import Served, serve
from quire.v1 import generation_pb2 as v1
from quire.v1.generation_pb2_grpc import GenerationServiceStub
from records.explain.accounting import Account, account
from records.explain.reading import study
from records.reader import Segment, read

if TYPE_CHECKING:
    from quire.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NUM_STREAMS = 192
"""Number of concurrent requests; greater than the number of rows, so that most requests wait."""
TENANTS = ("", "", "", "large", "large", "large", "small")
ADMISSION = "[tenants.small]\nmax_running = 4\n"
FLAGS = (
    "--workers=2",
    "--policy=priority",
    "--max-num-seqs=6",
    "--max-num-batched-tokens=512",
    "--record-bytes=134217728",
    "--resume-keep-s=0",
)
NUM_LAYERS = 24
RAMP_S = 4.0
"""Period in which the clients begin."""
BACK_OFF_S = 0.2
"""Time that a client waits after a refusal."""
LOST_S = 1.0
"""Length of the record that a killed scheduler may lose."""
_KINDS = {
    "short": 52,
    "long prompt": 12,
    "long answer": 8,
    "shared prefix": 12,
    "grammar": 7,
    "cancelled": 8,
    "slow": 1,
}
"""Request kinds with their weights."""


@dataclass(slots=True)
class Call:
    """One request as seen by its client."""

    request_id: str
    kind: str
    seconds: float = 0.0
    """Time from the call to the end of the stream."""
    ended_at: float = 0.0
    """Wall clock time in seconds."""
    num_messages: int = 0
    outcome: str = ""
    """"OK", or the gRPC code."""


@dataclass(slots=True)
class Run:
    """Outcome of a load."""

    record: Path
    calls: list[Call] = field(default_factory=list)
    refused: int = 0
    """Calls that the service did not accept."""
    worker_kills: int = 0
    scheduler_kills: list[float] = field(default_factory=list)
    """Wall clock times in seconds."""
    seconds: float = 0.0
    logged: dict[str, float] = field(default_factory=dict)
    """Duration of each request in the front end's log, by request id."""


class _Load:
    """Streams that are replaced when they end, until enough requests have been sent."""

    def __init__(self, served: Served, run: Run, num_requests: int, seed: int) -> None:
        self._served = served
        self._run = run
        self._num_requests = num_requests
        self._rng = random.Random(seed)
        self._started = 0
        self._prefixes = [self._prompt(400) for _ in range(4)]
        self._progress = asyncio.Event()
        """Set whenever a request ends."""

    async def run(self, num_worker_kills: int) -> None:
        """Send all requests; kill workers at equal intervals and the scheduler halfway."""
        async with AsyncExitStack() as stack:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [
                await stack.enter_async_context(aio.insecure_channel(self._served.grpc, options)) for _ in range(4)
            ]
            # The window fills up while a reader pauses, which must not stop other streams.
            slow = await stack.enter_async_context(
                aio.insecure_channel(self._served.grpc, [*options, ("grpc.http2.bdp_probe", 0)])
            )
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            tasks.create_task(self._kill(num_worker_kills))
            for index in range(NUM_STREAMS):
                stub = GenerationServiceStub(channels[index % len(channels)])
                tasks.create_task(self._one_after_another(stub, GenerationServiceStub(slow)))

    async def _kill(self, num_worker_kills: int) -> None:
        half = num_worker_kills // 2
        for number in range(num_worker_kills + 1):
            await self._until_ended((number + 1) * self._num_requests // (num_worker_kills + 2))
            if number == half:
                self._run.scheduler_kills.append(time.time())
                os.kill(self._served.pid("scheduler"), signal.SIGKILL)
                continue
            workers = self._served.children("worker")
            os.kill(self._rng.choice(workers).pid, signal.SIGKILL)
            self._run.worker_kills += 1

    async def _until_ended(self, count: int) -> None:
        while len(self._run.calls) < count:
            self._progress.clear()
            await self._progress.wait()

    async def _one_after_another(self, stub: "GenerationServiceAsyncStub", slow: "GenerationServiceAsyncStub") -> None:
        kinds, weights = list(_KINDS), list(_KINDS.values())
        # Clients start one after the other. Connecting all at once would measure the front end's accept queue.
        await asyncio.sleep(self._rng.uniform(0.0, RAMP_S))
        while self._started < self._num_requests:
            self._started += 1
            (kind,) = self._rng.choices(kinds, weights)
            call = Call(f"mixed-{self._started}", kind)
            request = self._draw(call)
            await self._call(slow if kind == "slow" else stub, call, request)
            if call.outcome in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
                self._run.refused += 1
                self._started -= 1
                await asyncio.sleep(BACK_OFF_S)
                continue
            self._run.calls.append(call)
            self._progress.set()

    async def _call(self, stub: "GenerationServiceAsyncStub", call: Call, request: v1.GenerateRequest) -> None:
        rng = self._rng
        patience = rng.choice((0, 3)) if call.kind == "cancelled" else -1
        began = time.monotonic()
        running = stub.Generate(request, timeout=600)
        try:
            if patience == 0:
                await asyncio.sleep(rng.uniform(0.2, 2.0))  # Cancel while the request waits.
                running.cancel()
            while await running.read() is not aio.EOF:
                call.num_messages += 1
                if call.num_messages == patience:
                    running.cancel()
                if call.num_messages == 1 and call.kind == "slow":
                    await asyncio.sleep(rng.uniform(0.5, 3.0))  # The pause makes this client a slow reader.
            call.outcome = "OK"
        except RpcError as error:
            call.outcome = error.code().name
        except asyncio.CancelledError:
            if patience < 0 or not running.cancelled():
                raise
            call.outcome = "CANCELLED"
        call.seconds, call.ended_at = time.monotonic() - began, time.time()

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(16, VOCAB_SIZE) for _ in range(length)]

    def _draw(self, call: Call) -> v1.GenerateRequest:
        rng = self._rng
        prompt, length = self._prompt(rng.randint(4, 40)), rng.randint(2, 12)
        request = v1.GenerateRequest(request_id=call.request_id)
        match call.kind:
            case "long prompt":
                prompt = self._prompt(rng.randint(200, 600))
            case "long answer" | "cancelled":
                length = rng.randint(30, 60)
            case "shared prefix":
                prompt = rng.choice(self._prefixes) + prompt
            case "grammar":
                words = ["".join(rng.choices("abcdef", k=4)) for _ in range(4)]
                # One grammar in four is new. The others are already compiled.
                request.grammar.choice.choices.extend(words if rng.random() < 0.25 else ("left", "right", "back"))
            case "slow":
                # More than the transport buffers for one client.
                length = 300
                request.output.logprobs = 20
        request.token_ids.ids.extend(prompt)
        request.stop.max_tokens = length
        request.stop.ignore_eos = call.kind != "grammar"
        request.scheduling.tenant = rng.choice(TENANTS)
        request.scheduling.priority = rng.choices((0, 1, 2), (99.4, 0.3, 0.3))[0]
        if rng.random() < 0.3:
            request.sampling.temperature, request.sampling.seed = 0.8, rng.getrandbits(32)
        return request


def run_load(folder: Path, num_requests: int, num_worker_kills: int, seed: int) -> Run:
    """Run the load with a flight record, then stop the service."""
    admission = folder / "admission.toml"
    admission.write_text(ADMISSION, encoding="utf-8")
    # Enough layers to make the workers the bottleneck.
    checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model", num_hidden_layers=NUM_LAYERS)
    run = Run(folder / "record")
    with serve(checkpoint, *FLAGS, f"--admission-file={admission}", f"--record-dir={run.record}") as served:
        began = time.monotonic()

        async def main() -> None:
            await _Load(served, run, num_requests, seed).run(num_worker_kills)

        asyncio.run(main())
        run.seconds = time.monotonic() - began
        served.wait_until_empty()
        ended = [line for line in served.log_lines() if line["event"] == "request ended"]
        run.logged = {line["request_id"]: line["seconds"] for line in ended}
    return run


@dataclass(slots=True)
class Check:
    """The calls in a run with their explanations."""

    run: Run
    accounts: dict[str, Account]
    """Explanations by request id, only for requests with an end and a front end report."""
    segments: list[Segment]

    @property
    def lost(self) -> list[Call]:
        """Return the calls whose end or report is not in the record."""
        return [call for call in self.run.calls if call.request_id not in self.accounts]

    def may_be_lost(self, call: Call) -> bool:
        """Return whether a call ended in the last second of a killed scheduler, or before the next scheduler served."""
        begins = [segment.opening.unix_ns / 1e9 for segment in self.segments if segment.opening.fresh][1:]
        return any(
            killed - LOST_S <= call.ended_at <= back + LOST_S
            for killed, back in zip(self.run.scheduler_kills, begins, strict=True)
        )

    def errors(self, kind: str = "", *, logged: bool = False) -> list[tuple[float, float, Call]]:
        """Return relative and absolute differences (s) between the sums and the measured times, sorted.

        Args:
            kind: the kind of calls; empty for all.
            logged: compare with the times in the front end's log instead of the client's.
        """
        found = []
        for call in self.run.calls:
            explained = self.accounts.get(call.request_id)
            if explained is None or call.outcome != "OK" or (kind and call.kind != kind):
                continue
            seconds = self.run.logged[call.request_id] if logged else call.seconds
            difference = abs(sum(cause.seconds for cause in explained.causes) - seconds)
            found.append((difference / seconds, difference, call))
        return sorted(found, key=lambda each: each[0])

    def figures(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        run, errors, logged = self.run, self.errors(), self.errors(logged=True)
        causes: Counter[str] = Counter()
        first: Counter[str] = Counter()
        for explained in self.accounts.values():
            for cause in explained.causes:
                causes[cause.kind.value] += cause.seconds  # type: ignore[assignment]
            first[explained.causes[0].kind.value] += 1
        whole = sum(causes.values())
        return {
            "requests": len(run.calls),
            "completed": sum(call.outcome == "OK" for call in run.calls),
            "outcomes": dict(Counter(call.outcome for call in run.calls)),
            "by_kind": dict(Counter(call.kind for call in run.calls)),
            "refused": run.refused,
            "worker_kills": run.worker_kills,
            "scheduler_kills": len(run.scheduler_kills),
            "seconds": round(run.seconds, 1),
            "segments": len(self.segments),
            "record_bytes": sum(segment.path.stat().st_size for segment in self.segments),
            "lost": len(self.lost),
            "client_s": _quantiles([call.seconds for _, _, call in errors]),
            "error_s": _quantiles([difference for _, difference, _ in errors]),
            "error_share": _quantiles([share for share, _, _ in errors]),
            "error_to_log_s": _quantiles([difference for _, difference, _ in logged]),
            "error_to_log_share": _quantiles([share for share, _, _ in logged]),
            "error_share_by_kind": {kind: _quantiles([each[0] for each in self.errors(kind)]) for kind in _KINDS},
            "share_of_causes": {name: round(seconds / whole, 4) for name, seconds in causes.most_common()},
            "first_causes": dict(first.most_common()),
            "worst": [f"{share:.2%} of {call.seconds:.3f} s: {call.kind}" for share, _, call in errors[-5:]],
        }


def check(run: Run) -> Check:
    """Read the record of a run and explain all its requests."""
    segments = read(run.record)
    found = study(segments, wanted=lambda _key, _request_id: True)
    accounts = {
        life.request_id: account(life) for life in found.lives if life.until is None and life.report is not None
    }
    return Check(run, accounts, segments)


def _quantiles(values: list[float]) -> dict[str, float]:
    return Spread.of(values).named("p50", "p90", "p95", "p99", "max", digits=5) if values else {}


def main() -> int:
    """Run the load and print the results."""
    options = parser("checks.chaos.mixed", __doc__)
    options.add_argument("--requests", type=int, default=10_000, help="number of requests (default: 10000)")
    options.add_argument("--kills", type=int, default=8, help="workers that are killed (default: 8)")
    options.add_argument("--seed", type=int, default=1, help="seed of the load (default: 1)")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tell(check(run_load(Path(folder), chosen.requests, chosen.kills, chosen.seed)).figures(), chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
