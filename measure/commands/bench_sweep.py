"""Finds how much load a running server can take: measures growing loads up to the highest one within the limits.

The load is doubled until the --slo limits are exceeded or the server is over-saturated. Then the interval is halved.
Without --slo it is doubled until the server is over-saturated, or to --to. A load whose result is uncertain at 95 %
confidence is measured again, up to --max-repeats times. The report has the curve, its knee, and suggested settings with
their reasons.
"""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from measure.commands._load import (
    add_generator_flags,
    add_server_flags,
    add_workload_flags,
    base_plan,
    measured,
    non_negative,
    number_of,
    positive,
    run_loop,
    share,
    slo_of,
    traits_of,
    what_requests_ask,
    workload_of,
    write_report,
)
from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from measure.load.run import Run
    from measure.load.search import Search
    from measure.load.sweep import SweepReport

EXAMPLES = """
  quire bench sweep --slo ttft_ms=500 --slo itl_ms=100 --html sweep.html
  quire bench sweep --slo e2e_ms=3000 --users --workload azure-conversation --metrics 127.0.0.1:8000
  quire bench sweep --loads 1,2,4,8,16 --duration 30 --json sweep.json
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add_server_flags(parser)
    add = parser.add_argument
    add(
        "--users", action="store_true", help="closed loop: the load is a number of users (default: sessions per second)"
    )
    add("--think", type=non_negative, default=0.0, metavar="S", help="closed loop: pause of a user, seconds")
    add("--burstiness", type=positive, default=1.0, metavar="B", help="open loop: shape of the gaps' distribution;"
        " 1 (default) gives Poisson arrivals, smaller is burstier")  # fmt: skip
    add("--loads", type=_loads, metavar="L,L,…", help="measure these loads only, without a search")
    add("--from", type=positive, default=1.0, dest="first", metavar="L", help="first load of the search (default: 1)")
    add("--to", type=positive, default=256.0, dest="last", metavar="L", help="highest load (default: 256)")
    add("--tolerance", type=positive, default=0.1, metavar="P", help="relative error of the result (default: 0.1)")
    add("--share", type=share, default=0.95, metavar="P", help="share of requests that must be within the limits"
        " (default: 0.95)")  # fmt: skip
    add("--max-repeats", type=number_of, default=3, metavar="N", help="runs of a load whose result is uncertain"
        " (default: 3)")  # fmt: skip
    add("--duration", type=positive, default=20.0, metavar="S", help="duration of a run (default: 20)")
    add("--warmup", type=non_negative, default=2.0, metavar="S", help="do not count its first S seconds (default: 2)")
    add_workload_flags(parser)
    add_generator_flags(parser)


def run(options: Namespace) -> int:
    """Run the sweep and report."""
    report = run_loop(_measure(options))
    write_report(options, report.to_json(), report.page)
    print("\n".join(report.table()))
    return 0 if any(point.figures.done for point in report.points) else 1


async def _measure(options: Namespace) -> "SweepReport":
    from measure.load.arrivals import Gamma, Users
    from measure.load.sweep import SweepReport, sweep

    slo = slo_of(options)
    unit = "users" if options.users else "sessions/s"
    loads = _loads_of(options)
    plan = await base_plan(options)

    async def measure(load: float, number: int) -> "Run":
        seed = options.seed + number
        arrivals = Users(round(load), options.think) if options.users else Gamma(load, options.burstiness)
        seeded = replace(
            plan,
            arrivals=arrivals,
            workload=workload_of(options, seed),
            traits=traits_of(options, seed),
            seed=seed,
            warmup_s=options.warmup,
            duration_s=options.duration,
        )
        return await measured(options, seeded, slo, f"[{load:.4g} {unit}] ")

    points = await sweep(measure, loads, slo, share=options.share, max_repeats=options.max_repeats)
    return SweepReport(
        title=f"quire bench sweep, {options.url or options.target}",
        load=f"{what_requests_ask(options)}, {options.duration:g} s for each load",
        unit=unit,
        slo=slo,
        share=options.share,
        points=tuple(points),
        has_tenants=bool(options.tenants),
        has_priorities=bool(options.priorities),
    )


def _loads_of(options: Namespace) -> "Search | Sequence[float]":
    from measure.load.search import Search

    if options.users and any(load != round(load) for load in [*(options.loads or ()), options.first, options.last]):
        raise CommandError(
            "--users: the number of users must be whole; pass whole numbers with --loads, --from and --to"
        )
    if options.loads:
        return sorted(options.loads)
    if options.first > options.last:
        raise CommandError(f"--from: {options.first:g} is above --to; use --from below --to")
    return Search(options.first, options.last, options.tolerance, is_whole=options.users)


def _loads(text: str) -> list[float]:
    try:
        return [positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of loads; write 1,2,4") from None
