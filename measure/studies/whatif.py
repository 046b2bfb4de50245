"""Error of `quire replay --set`: each setting of a service is predicted from the records of the others.

.venv/bin/python -m measure.studies.whatif --json measure/results/whatif.json   # ten minutes; keep the machine idle
.venv/bin/python -m measure.studies.whatif --records FOLDER    # keep the records there; use those that exist
.venv/bin/python -m measure.studies.whatif --speculation --json measure/results/whatif-speculation.json   # with drafts

Each of five loads is sent to `quire serve` under each of three settings, `--runs` times. A prediction uses the record
for one setting to predict another: six pairs per load, 30 in total. The measured value is the mean over the runs of the
setting asked for. The spread is the distance between these runs, relative to their mean. A prediction cannot be more
accurate than that. `same` predicts a run from its own record.

With `--speculation`, the settings differ in their drafts, and two loads have texts that repeat themselves. A record
without drafts predicts no run with drafts.

`python -m measure.studies.whatif_page` writes the table and the plot of docs/replay.md.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.strategies import other_work
from measure.testbed.service import serve
from quire import AsyncClient
from records.whatif.answer import Case, compare, from_record
from records.whatif.figures import Figures

SETTINGS: tuple[tuple[str, ...], ...] = (
    ("max_num_seqs=64", "policy=fcfs"),
    ("max_num_seqs=8", "policy=fcfs"),
    ("max_num_seqs=4", "policy=sjf"),
)
SPECULATION: tuple[tuple[str, ...], ...] = (
    ("speculation=ngram", "speculative_tokens=8"),
    ("speculation=ngram", "speculative_tokens=2"),
    ("speculation=off",),
)
FIGURES = ("throughput", "ttft_mean", "ttft_p99", "itl_mean", "e2e_mean")
WARM_UP = 20
"""Sequential requests before the load, because the first ones in a service are slower. They are recorded as well."""
WORDS = ("the", "fox", "ran", "over", "a", "hill", "and", "then", "it", "saw", "an", "old", "man", "who", "sat", "by")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at random times with random lengths."""

    name: str
    rate: float
    """Requests per second."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps; 1 gives Poisson arrivals."""
    words: tuple[int, int] = (5, 200)
    """Bounds on the prompt length, in words."""
    shared: float = 0.4
    """Share of the prompts that begin with one of three prefixes of 60 words."""
    repeated: float = 0.0
    """Share of prompts that repeat a question and are decoded greedily. Others are sampled."""
    median_tokens: float = 36.6
    """Median number of generated tokens."""


LOADS = (
    Load("steady", 16.0),
    Load("busy", 24.0),
    Load("bursts", 16.0, burstiness=0.25),
    Load("long prompts", 10.0, words=(200, 600)),
    Load("shared prefixes", 24.0, words=(5, 60), shared=1.0),
)
SPECULATION_LOADS = (
    Load("single requests", 1.0, shared=0.0, repeated=1.0, median_tokens=150.0),
    Load("mixed texts", 4.0, shared=0.0, repeated=0.5, median_tokens=80.0),
)


async def drive(target: str, load: Load, duration_s: float, seed: int) -> None:
    """Send requests at random times; wait for all responses."""
    rng = random.Random(f"{load.name} {seed}")
    prefixes = [" ".join(rng.choices(WORDS, k=60)) + " " for _ in range(3)]
    async with AsyncClient(target) as client:
        for _ in range(WARM_UP):
            await client.generate(" ".join(rng.choices(WORDS, k=100)), max_tokens=8, ignore_eos=True).result()
        begin = time.monotonic()
        end = begin + duration_s
        tasks = []
        while (begin := begin + rng.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness))) < end:
            prefix = rng.choice(prefixes) if rng.random() < load.shared else ""
            prompt = prefix + " ".join(rng.choices(WORDS, k=rng.randint(*load.words)))
            repeats = load.repeated > 0 and rng.random() < load.repeated
            if repeats:
                prompt = f"What is {rng.randint(1, 9)} + {rng.randint(1, 9)}? " * 4
            tokens = max(4, min(400 if repeats else 200, int(rng.lognormvariate(math.log(load.median_tokens), 0.8))))
            await asyncio.sleep(max(0.0, begin - time.monotonic()))
            temperature = 0.0 if repeats else 1.0
            generation = client.generate(prompt, max_tokens=tokens, ignore_eos=True, seed=seed, temperature=temperature)
            tasks.append(asyncio.create_task(generation.result()))
        await asyncio.gather(*tasks)


def record(settings: Sequence[str], load: Load, duration_s: float, folder: Path) -> Path:
    """Serve the requests under these settings; return the folder of the record. An existing record is reused."""
    place = folder / "quire" / "record" / "any"
    if not place.exists():
        flags = ["--" + setting.replace("_", "-") for setting in settings]
        folder.mkdir(parents=True, exist_ok=True)
        with serve("demo", *flags, environ={"XDG_STATE_HOME": str(folder)}) as served:
            asyncio.run(drive(served.grpc, load, duration_s, seed=1))
    return place


def values(figures: Figures) -> dict[str, float]:
    """Return the metrics that are predicted."""
    return {
        "throughput": figures.output_tokens_per_s,
        "ttft_mean": figures.ttft.mean,
        "ttft_p99": figures.ttft.p99,
        "itl_mean": figures.itl.mean,
        "e2e_mean": figures.e2e.mean,
    }


def changes(settings: Sequence[str]) -> list[str]:
    """Return the settings to change in a simulation. How drafts are proposed is not recorded."""
    return [each for each in settings if each != "speculation=ngram"]


def mean_and_spread(runs: Sequence[Figures]) -> tuple[dict[str, float], dict[str, float]]:
    """Return for each metric the mean over the runs, and half their range relative to the mean."""
    found = [values(run) for run in runs]
    means = {name: sum(each[name] for each in found) / len(found) for name in FIGURES}
    spreads = {
        name: (max(each[name] for each in found) - min(each[name] for each in found)) / 2 / means[name]
        for name in FIGURES
    }
    return means, spreads


def predict(cases: dict[tuple[str, ...], list[Case]], load: Load) -> list[dict[str, Any]]:
    """Predict each setting from the first record of every other; return one row per pair."""
    rows = []
    for source, target in itertools.product(cases, cases):
        if source == ("speculation=off",) != target:
            continue
        runs = [case.recorded for case in cases[target] if case.recorded is not None]
        measured, spread = mean_and_spread(runs if source != target else runs[:1])
        comparison = compare(cases[source][0], changes(target) if source != target else [])
        predicted = values((comparison.changed or comparison.simulated).figures)
        error = {name: predicted[name] / measured[name] - 1 for name in FIGURES}
        rows.append(
            {
                "load": load.name,
                "kind": "same" if source == target else "changed",
                "from": " ".join(source),
                "to": " ".join(target),
                "measured": measured,
                "predicted": predicted,
                "spread": spread,
                "error": error,
            }
        )
        text = ", ".join(f"{name} {error[name]:+.1%} (± {spread[name]:.1%})" for name in FIGURES)
        print(f"{load.name}: {' '.join(source)} -> {' '.join(target)}: {text}", flush=True)
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="runs of each load and setting (default: 2)")
    parser.add_argument("--duration", type=float, default=12.0, help="seconds of each run (default: 12)")
    parser.add_argument("--loads", type=int, default=len(LOADS), help="only the first loads (default: all)")
    parser.add_argument("--speculation", action="store_true", help="settings and loads with drafts")
    parser.add_argument("--records", type=Path, help="folder of the records (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    all_loads: Sequence[Load] = SPECULATION_LOADS if options.speculation else LOADS
    loads = all_loads[: options.loads]
    settings_of_runs = SPECULATION if options.speculation else SETTINGS
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.records or Path(temporary)
        before = other_work.now()
        places = {
            (load, settings, number): record(
                settings,
                load,
                options.duration,
                folder / f"{load.name}, {' '.join(settings)}, {number}".replace(" ", "-"),
            )
            for number in range(options.runs)
            for load in loads
            for settings in settings_of_runs
        }
        by_others = other_work.share_of_others(before, other_work.now(), os.cpu_count() or 1)
        for load in loads:
            cases = {
                settings: [from_record(places[load, settings, number]) for number in range(options.runs)]
                for settings in settings_of_runs
            }
            rows += predict(cases, load)
    document = {
        "runs": options.runs,
        "duration_s": options.duration,
        "cpu_share_of_other_programs": by_others,
        "results": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
