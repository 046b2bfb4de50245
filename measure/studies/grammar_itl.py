"""How much rows with a grammar slow other rows: inter-token gaps of unconstrained streams next to unconstrained or
grammar rows.

.venv/bin/quire serve &
.venv/bin/python measure/studies/grammar_itl.py 127.0.0.1:50051 --json measure/results/grammar_itl.json
"""

import argparse
import asyncio
import itertools
import json
import platform
import statistics
import time
from pathlib import Path

from quire import AsyncClient

PLAIN, BESIDE, TOKENS = 16, 16, 160
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[a-z]{40,60}$"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
    "minItems": 50,
}


async def measured(client: AsyncClient, seed: int) -> list[float]:
    """Return the inter-token gaps of one unconstrained stream, in seconds."""
    times = []
    async for delta in client.generate("Once upon a time", max_tokens=TOKENS, ignore_eos=True, seed=seed):
        times += [time.perf_counter()] * len(delta.token_ids)
    return [b - a for a, b in itertools.pairwise(times)][20:]


async def round_of(client: AsyncClient, *, grammars: bool) -> list[float]:
    """Return the gaps of unconstrained streams that run with as many others, which have a grammar or not."""
    options = {"json_schema": SCHEMA} if grammars else {"ignore_eos": True}
    beside = [client.generate("Answer: ", max_tokens=TOKENS + 60, seed=seed, **options) for seed in range(BESIDE)]
    await asyncio.gather(*(anext(generation) for generation in beside))
    others = [asyncio.create_task(generation.result()) for generation in beside]
    gaps = await asyncio.gather(*(measured(client, seed) for seed in range(PLAIN)))
    await asyncio.gather(*others)
    return [gap for each in gaps for gap in each]


async def measure(target: str) -> dict[str, object]:
    """Measure both loads alternately, three rounds each; return their results."""
    async with AsyncClient(target) as client:
        await round_of(client, grammars=True)
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(3):
            for grammars in found:
                found[grammars] += await round_of(client, grammars=grammars)
    results = []
    for grammars, gaps in found.items():
        quantiles = statistics.quantiles(gaps, n=100)
        beside = "grammar" if grammars else "plain"
        print(f"beside {BESIDE} {beside} rows: ITL p50 {quantiles[49] * 1e3:.2f} ms, p99 {quantiles[98] * 1e3:.2f} ms")
        results.append(
            {
                "beside": beside,
                "rows_measured": PLAIN,
                "rows_beside": BESIDE,
                "gaps": len(gaps),
                "itl_ms_mean": statistics.mean(gaps) * 1e3,
                "itl_ms_p50": quantiles[49] * 1e3,
                "itl_ms_p90": quantiles[89] * 1e3,
                "itl_ms_p99": quantiles[98] * 1e3,
            }
        )
    return {"machine": platform.machine(), "model": "demo", "results": results}


def main() -> None:
    """Measure the service that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="HOST:PORT of the service's gRPC")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    found = asyncio.run(measure(options.target))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
