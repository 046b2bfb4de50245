"""Error of `quire replay --set`: each setting of a service is predicted from the records of the others.

.venv/bin/python -m benchmarks.whatif --seeds 3 --json benchmarks/results/whatif.json

For each seed, the same requests (Poisson arrivals, log-normal lengths, some shared prefixes) are sent to `quire serve`
under each setting. Every ordered pair of two settings is one prediction: six pairs per seed. `same` predicts a run from
its own record. Runs of different seeds show the spread of the service itself.
"""

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from pathlib import Path

from quire import AsyncClient
from scheduler_svc.whatif.answer import Case, compare, from_record
from scheduler_svc.whatif.figures import Figures
from tests.e2e.harness import serve

SETTINGS = (
    ("max_num_seqs=64", "policy=fcfs"),
    ("max_num_seqs=8", "policy=fcfs"),
    ("max_num_seqs=4", "policy=sjf"),
)
WORDS = [
    "the",
    "fox",
    "ran",
    "over",
    "a",
    "hill",
    "and",
    "then",
    "it",
    "saw",
    "the",
    "old",
    "man",
    "who",
    "sat",
    "by",
    "a",
    "tree",
]


async def drive(target: str, rate: float, count: int, seed: int) -> None:
    """Send requests at random times; wait for all answers."""
    rng = random.Random(seed)
    prefixes = [" ".join(rng.choices(WORDS, k=60)) + " " for _ in range(3)]
    begin = time.monotonic()
    async with AsyncClient(target) as client:
        tasks = []
        for _ in range(count):
            begin += rng.expovariate(rate)
            prefix = rng.choice(prefixes) if rng.random() < 0.4 else ""
            prompt = prefix + " ".join(rng.choices(WORDS, k=rng.randint(5, 200)))
            tokens = max(4, min(200, int(rng.lognormvariate(3.6, 0.8))))
            await asyncio.sleep(max(0.0, begin - time.monotonic()))
            generation = client.generate(prompt, max_tokens=tokens, ignore_eos=True, seed=seed)
            tasks.append(asyncio.create_task(generation.result()))
        await asyncio.gather(*tasks)


def run(settings: tuple[str, ...], rate: float, count: int, seed: int) -> Case:
    """Serve the requests under settings; return the record."""
    flags = ["--" + setting.replace("_", "-") for setting in settings]
    with tempfile.TemporaryDirectory() as folder:
        with serve("demo", *flags, environ={"XDG_STATE_HOME": folder}) as served:
            asyncio.run(drive(served.grpc, rate, count, seed))
        return from_record(Path(folder) / "quire" / "record")


def errors(predicted: Figures, measured: Figures) -> dict[str, float]:
    """Return the relative errors of a prediction."""
    return {
        "throughput": predicted.output_tokens_per_s / measured.output_tokens_per_s - 1,
        "ttft_mean": predicted.ttft.mean / measured.ttft.mean - 1,
        "ttft_p99": predicted.ttft.p99 / measured.ttft.p99 - 1,
        "itl_mean": predicted.itl.mean / measured.itl.mean - 1,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second (default: 10)")
    parser.add_argument("--requests", type=int, default=200, help="requests of each run (default: 200)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    for seed in range(1, options.seeds + 1):
        cases = {settings: run(settings, options.rate, options.requests, seed) for settings in SETTINGS}
        for source, target in itertools.product(SETTINGS, SETTINGS):
            measured = cases[target].recorded
            assert measured is not None
            comparison = compare(cases[source], list(target) if source != target else [])
            predicted = (comparison.changed or comparison.simulated).figures
            kind = "same" if source == target else "changed"
            shown = errors(predicted, measured)
            found.append(
                {"seed": seed, "kind": kind, "from": source, "to": target, "ttft_mean_s": measured.ttft.mean, **shown}
            )
            text = ", ".join(f"{name} {value:+.1%}" for name, value in shown.items())
            print(f"seed {seed}: {' '.join(source)} -> {' '.join(target)}: {text}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
