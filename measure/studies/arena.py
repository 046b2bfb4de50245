"""Compare Quire's default policy and `slo` with vLLM's scheduler on three traces, two devices and two loads.

    python -m measure.studies.arena --traces FOLDER --capacities --seeds 1,2,3
    python -m measure.studies.arena --traces FOLDER --schedulers vllm:best --json vllm.json
    python -m measure.studies.arena --traces FOLDER --schedulers quire:default,quire:slo --seeds 1,2,3 \
        --against vllm.json --json quire.json

FOLDER has the traces by their names in `CELLS`. Each run is one of `quire bench policies` (docs/arena.md), of a short
part of the trace. So a round of one scheduler takes about a minute of CPU time. The first command measures the
capacities in `CELLS`. The last one prints the targets: for each trace, device and load, how the medians over the seeds
compare with those of vLLM's best setting. `--reuse FILE` prints the table of earlier results.
`--cells` selects cells by a part of their name.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure.policies.campaign import Campaign
from measure.policies.costs import read_costs
from measure.policies.metrics import Result
from measure.policies.report import HEADER, line
from measure.policies.schedulers import VLLM_PYTHON, Setup, parse
from measure.policies.workloads import trace_of


@dataclass(frozen=True, slots=True)
class Cell:
    """A trace, a device, and the share of the trace that is the device's capacity."""

    workload: str
    trace: str
    costs: str
    capacity: float
    """Smallest share of the trace's requests at which vLLM's fcfs keeps the device 99 % busy between the first and the
    last arrival. `--capacities` measures it. For Azure's conversations, it is the throughput of vLLM's fcfs under
    overload, because requests with long outputs keep a device busy long before that.
    """
    seconds: float
    """Length of the part of the trace."""
    busiest: tuple[float, float] | None = None
    """Part whose requests are used to measure the capacity, from and to, s; None for all. They arrive at even distances
    then, because no load fills the pauses of such a trace.
    """

    @property
    def name(self) -> str:
        return f"{self.trace.split('.')[0]} {self.costs}"


_MOONCAKE = "mooncake_conversation_0-30min.jsonl.gz"
_CODE, _CONVERSATIONS = "azure_code_first_half.csv.gz", "azure_conv_first_half.csv.gz"
CELLS = (
    Cell("mooncake", _MOONCAKE, "8b-h100", 0.469, 240.0),
    Cell("mooncake", _MOONCAKE, "70b-4xh100", 0.223, 400.0),
    Cell("azure", _CODE, "8b-h100", 2.51, 270.0, busiest=(180.0, 240.0)),
    Cell("azure", _CODE, "70b-4xh100", 0.514, 270.0, busiest=(180.0, 240.0)),
    Cell("azure", _CONVERSATIONS, "8b-h100", 4.83, 60.0),
    Cell("azure", _CONVERSATIONS, "70b-4xh100", 2.75, 60.0),
)
LOADS = (0.9, 1.1)
"""Loads as shares of the capacity."""
_BUSY = 0.99
"""Share of the time in which a device at its capacity computes while requests arrive."""
_PRECISION = 0.01
"""Relative precision of a measured capacity."""


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on the ratio between a scheduler's metric and vLLM's."""

    scheduler: str
    name: str
    bounds: tuple[float, float]
    """The bound at each load of `LOADS`."""
    is_minimum: bool = False


TARGETS = (
    Target("quire:default", "throughput", (0.99, 0.99), is_minimum=True),
    Target("quire:default", "short TTFT p99", (0.5, 0.5)),
    Target("quire:default", "outside targets", (0.7, 0.7)),
    Target("quire:slo", "outside targets", (0.5, 0.6)),
)


def metric(name: str, result: Result) -> float:
    """Return a metric of a target by its name."""
    if name == "throughput":
        return float(result["out_tok_per_s"])
    if name == "short TTFT p99":
        return float(result["short_prompts"]["ttft_s"]["p99"] or 0.0)
    return 1.0 - float(result["goodput"])


def runs(
    schedulers: Sequence[str], seeds: Sequence[int], traces: Path, cells: Sequence[Cell], python: Path
) -> Iterator[Result]:
    """Run each scheduler in each cell, and yield the results; each has the cell's name and the load."""
    for cell in cells:
        recorded = trace_of(cell.workload, traces / cell.trace, cell.seconds)
        for load in LOADS:
            campaign = Campaign(
                workload=cell.workload,
                loads=[round(load * cell.capacity, 4)],
                seeds=seeds,
                schedulers=[parse(each) for each in schedulers],
                setup=Setup(costs=read_costs(cell.costs), num_workers=1, in_flight=1, vllm_python=python),
                seconds=cell.seconds,
                recorded=recorded,
            )
            for result in campaign.results():
                yield {"cell": cell.name, "of_capacity": load, **result}


def capacity(cell: Cell, seeds: Sequence[int], traces: Path, python: Path) -> float:
    """Return the smallest share of the trace at which vLLM's fcfs keeps the device 99 % busy (median of the seeds)."""
    begin, end = cell.busiest or (0.0, cell.seconds)
    recorded = [each for each in trace_of(cell.workload, traces / cell.trace, end) if each.time_s >= begin]
    if cell.busiest is not None:
        gap = (end - begin) / len(recorded)
        recorded = [replace(each, time_s=number * gap) for number, each in enumerate(recorded)]

    def is_busy(share: float) -> bool:
        campaign = Campaign(
            workload=cell.workload,
            loads=[share],
            seeds=seeds,
            schedulers=[parse("vllm:fcfs")],
            setup=Setup(costs=read_costs(cell.costs), num_workers=1, in_flight=1, vllm_python=python),
            seconds=end - begin,
            recorded=recorded,
        )
        return statistics.median(float(each["arrivals_busy_share"]) for each in campaign.results()) >= _BUSY

    return smallest(is_busy, cell.capacity)


def smallest(is_busy: Callable[[float], bool], guess: float) -> float:
    """Return the smallest share that is busy, for a function that is monotone, by bisection around a guess."""
    low = high = guess
    if is_busy(guess):
        while is_busy(low := low / 1.25):
            high = low
    else:
        while not is_busy(high := high * 1.25):
            low = high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_busy(middle) else (middle, high)
    return high


def best_of_peer(results: Sequence[Result], cell: str, load: float) -> dict[int, Result]:
    """Return by seed the results of vLLM's best setting: the most jobs within targets, then the shortest mean TTFT."""
    found: dict[str, dict[int, Result]] = {}
    for each in results:
        if each["scheduler"].startswith("vllm:") and (each["cell"], each["of_capacity"]) == (cell, load):
            found.setdefault(each["scheduler"], {})[each["seed"]] = each
    most = max(map(len, found.values()), default=0)

    def rank(name: str) -> tuple[float, float]:
        of_seeds = found[name].values()
        in_time = statistics.fmean(each["goodput"] for each in of_seeds)
        return -in_time, statistics.fmean(each["ttft_s"]["mean"] for each in of_seeds)

    return found[min((name for name in found if len(found[name]) == most), key=rank)] if found else {}


@dataclass(frozen=True, slots=True)
class Row:
    """One target in one cell at one load."""

    cell: str
    load: float
    target: Target
    bound: float
    ratios: list[float]
    """Ratio to vLLM for each seed."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.bound if self.target.is_minimum else self.ratio <= self.bound


def judge(ours: Sequence[Result], peers: Sequence[Result], names: Sequence[str]) -> list[Row]:
    """Return all targets for which there are results.

    Args:
        ours: results of Quire.
        peers: results of vLLM.
        names: the schedulers that stand for `quire:default` and `quire:slo`.
    """
    stands_for = {target.scheduler: target.scheduler for target in TARGETS}
    stands_for |= {name.split("+")[0]: name for name in names}
    rows = []
    for cell in CELLS:
        for at, load in enumerate(LOADS):
            best = best_of_peer(peers, cell.name, load)
            for target in TARGETS:
                ratios = [
                    metric(target.name, each) / max(1e-9, metric(target.name, best[each["seed"]]))
                    for each in ours
                    if (each["cell"], each["of_capacity"]) == (cell.name, load)
                    and each["scheduler"] == stands_for[target.scheduler]
                    and each["seed"] in best
                ]
                if ratios:
                    rows.append(Row(cell.name, load, target, target.bounds[at], ratios))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the targets as a table."""
    lines = [
        "| trace, device | load | scheduler | metric | bound | ratio to vLLM | range | |",
        "|---|--:|---|---|--:|--:|---|---|",
    ]
    for row in rows:
        sign, span = "≥" if row.target.is_minimum else "≤", f"{min(row.ratios):.3f} to {max(row.ratios):.3f}"
        lines.append(
            f"| {row.cell} | {row.load} | {row.target.scheduler} | {row.target.name} | {sign} {row.bound} |"
            f" {row.ratio:.3f} | {span} | {'met' if row.is_met else 'missed'} |"
        )
    missed = sum(not row.is_met for row in rows)
    return "\n".join([*lines, "", f"{missed} of {len(rows)} targets missed"])


def _read(path: Path | None) -> list[Any]:
    return list(json.loads(path.read_text("utf-8"))["results"]) if path is not None else []


def main() -> None:
    """Run, write the results and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", type=Path, default=Path())
    parser.add_argument("--schedulers", default="quire:default,quire:slo")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--cells", default="", help="run only cells whose name contains this")
    parser.add_argument("--capacities", action="store_true", help="measure the capacities, and nothing else")
    parser.add_argument("--against", type=Path, help="results with vLLM's schedulers")
    parser.add_argument("--reuse", type=Path, help="print the table of these results, and run nothing")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON)
    options = parser.parse_args()
    schedulers = options.schedulers.split(",")
    seeds = [int(each) for each in options.seeds.split(",")]
    cells = [cell for cell in CELLS if options.cells in cell.name]
    if options.capacities:
        for cell in cells:
            found = capacity(cell, seeds, options.traces, options.vllm_python)
            print(f"{cell.name}: {found:.3g} of the trace (so far {cell.capacity})", flush=True)
        return
    results: list[Result] = _read(options.reuse)
    if options.reuse is None:
        print(HEADER)
        for result in runs(schedulers, seeds, options.traces, cells, options.vllm_python):
            results.append(result)
            print(line(result), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({"results": results}, indent=1) + "\n", "utf-8")
    peers = [*_read(options.against), *results]
    if rows := judge(results, peers, schedulers):
        print(table(rows))


if __name__ == "__main__":
    main()
