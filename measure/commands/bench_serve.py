"""Measures a running server under load: throughput, latencies, goodput, and the server's own metrics during the run.

The load is open (--rate, --trace: requests arrive whatever the server does) or closed (--concurrency: that many users,
each waits for its response). Latency counts from the intended start of a request, so a server that stalls shows the
stall in every request that was due meanwhile. The delay of the generator itself is measured and reported.

Without --url it calls a Quire server over gRPC; with --url, any server with OpenAI's API. docs/benchmarking.md explains
the numbers.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from measure.commands._load import (
    add_generator_flags,
    add_server_flags,
    add_workload_flags,
    base_plan,
    length_of_run,
    measured,
    non_negative,
    number_of,
    positive,
    run_loop,
    slo_of,
    traits_of,
    workload_of,
    write_report,
)
from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from measure.load.arrivals import OpenLoop, Users
    from measure.load.plan import Plan
    from measure.load.report import Report
    from measure.load.workloads import Workload

EXAMPLES = """
  quire bench serve --rate 4 --duration 60 --slo ttft_ms=500 --slo itl_ms=100 --html report.html
  quire bench serve --concurrency 16 --requests 200 --input 64-512 --output lognormal:128:0.8
  quire bench serve --rate 2 --workload azure-conversation --repeats 5 --json report.json
  quire bench serve --url http://127.0.0.1:8000 --rate 4 --prompts chat --shared-prefix 256
  quire bench serve --url http://127.0.0.1:8000 --agents 16 --duration 600 --json agents.json
  quire bench serve --trace AzureLLMInferenceTrace_conv.csv --speed 2 --duration 300
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add_server_flags(parser)
    add = parser.add_argument
    add("--rate", type=positive, metavar="R", help="open loop: sessions that begin per second")
    add("--burstiness", type=positive, default=1.0, metavar="B", help="shape of the gamma distribution of gaps:"
        " 1 (default) gives Poisson arrivals, smaller is burstier; the CV of the gaps is 1/√B")  # fmt: skip
    add("--constant", action="store_true", help="open loop: equal gaps")
    add("--ramp-to", type=positive, metavar="R", help="open loop: the rate changes from --rate to this one")
    add("--trace", type=Path, metavar="FILE", help="open loop: times and lengths from an Azure or Mooncake trace")
    add("--speed", type=positive, default=1.0, metavar="X", help="replay the trace X times as fast (default: 1)")
    add("--concurrency", type=number_of, metavar="N", help="closed loop: number of users")
    add("--agents", type=number_of, metavar="N", help="closed loop: number of coding agents (--concurrency N --workload"
        " coding-agents)")  # fmt: skip
    add("--think", type=non_negative, default=0.0, metavar="S", help="closed loop: pause of a user, seconds")
    add("--duration", type=positive, metavar="S", help="seconds during which sessions begin (default: 30)")
    add("--requests", type=number_of, metavar="N", help="number of sessions; a session has one request, or --turns")
    add("--warmup", type=non_negative, default=0.0, metavar="S", help="do not count sessions of the first S seconds")
    add("--repeats", type=number_of, default=1, metavar="N", help="runs with different seeds; reports 95 %% intervals")
    add("--no-early-stop", action="store_true", help="continue when the server is over-saturated")
    add_workload_flags(parser)
    add_generator_flags(parser)


def run(options: Namespace) -> int:
    """Run the benchmark and report."""
    from measure.load.html import page

    report = run_loop(_measure(options))
    write_report(options, report.to_json(), lambda: page(report))
    print("\n".join(report.table()))
    return 0 if report.figures.done else 1


async def _measure(options: Namespace) -> "Report":
    from measure.load.report import Report

    slo = slo_of(options)
    _check_loop(options)
    if options.agents is not None:
        options.concurrency, options.workload = options.agents, "coding-agents"
    plan = await base_plan(options)
    runs = []
    for number in range(options.repeats):
        seeded = _with_load(plan, options, options.seed + number)
        runs.append(await measured(options, seeded, slo, f"[{number + 1}/{options.repeats}] "))
    server = options.url or options.target
    return Report(f"quire bench serve, {server}", describe_load(options), slo, tuple(runs))


def _check_loop(options: Namespace) -> None:
    given = [name for name in ("rate", "trace", "concurrency", "agents") if getattr(options, name) is not None]
    if len(given) != 1:
        said = " and ".join(f"--{name}" for name in given) or "no load"
        raise CommandError(
            f"{said} given; use one of --rate (open loop), --trace, --concurrency or --agents (closed loop)"
        )
    if options.trace is not None and (options.workload or options.dataset):
        raise CommandError("--trace: a trace defines the lengths; remove --workload or --dataset")
    if options.agents is not None and (options.workload or options.dataset):
        raise CommandError("--agents: agents have lengths of their own; remove --workload or --dataset")


def _with_load(plan: "Plan", options: Namespace, seed: int) -> "Plan":
    duration_s, sessions = length_of_run(options, is_finite=options.trace is not None or options.dataset is not None)
    arrivals, workload = _load(options, seed, duration_s)
    return replace(
        plan,
        arrivals=arrivals,
        workload=workload,
        traits=traits_of(options, seed),
        seed=seed,
        warmup_s=options.warmup,
        duration_s=duration_s,
        sessions=sessions,
        stops_early=not options.no_early_stop,
    )


def _load(options: Namespace, seed: int, duration_s: float | None) -> "tuple[OpenLoop | Users, Workload]":
    from measure.load.arrivals import Constant, Gamma, Ramp, Users
    from measure.load.traces import PUBLISHED, read_trace

    if options.trace is not None:
        trace = read_trace(options.trace, seed)
        return trace.arrivals(options.speed), trace
    workload = workload_of(options, seed)
    if options.concurrency is not None:
        return Users(options.concurrency, options.think), workload
    if options.ramp_to is not None:
        if duration_s is None:
            raise CommandError("--ramp-to: the duration of the ramp is missing; add --duration")
        return Ramp(options.rate, options.ramp_to, options.warmup + duration_s), workload
    if options.constant:
        return Constant(options.rate), workload
    if options.workload and options.burstiness == 1.0:
        return PUBLISHED[options.workload].arrivals(options.rate), workload
    return Gamma(options.rate, options.burstiness), workload


def describe_load(options: Namespace) -> str:
    """Describe the load in words."""
    if options.trace is not None:
        return f"trace {options.trace.name} at {options.speed:g} times its speed"
    what = (
        options.workload
        or (options.dataset.name if options.dataset else "")
        or (f"{options.input} prompt and {options.output} output tokens")
    )
    if options.concurrency is not None:
        return f"{options.concurrency} users (closed loop), {what}"
    how = "constant" if options.constant else f"ramp to {options.ramp_to:g}" if options.ramp_to else "open loop"
    return f"{options.rate:g} sessions/s ({how}), {what}"
