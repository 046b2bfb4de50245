"""What rows with a grammar cost the others: the time between tokens of plain streams, beside plain and grammar rows.

.venv/bin/python benchmarks/grammar_itl.py 127.0.0.1:50051
"""

import asyncio
import itertools
import statistics
import sys
import time

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
    """Gaps between the tokens of one plain stream, seconds."""
    times = []
    async for delta in client.generate("Once upon a time", max_tokens=TOKENS, ignore_eos=True, seed=seed):
        times += [time.perf_counter()] * len(delta.token_ids)
    return [b - a for a, b in itertools.pairwise(times)][20:]


async def round_of(client: AsyncClient, *, grammars: bool) -> list[float]:
    """Gaps of plain streams beside as many others, which have a grammar or not."""
    options = {"json_schema": SCHEMA} if grammars else {"ignore_eos": True}
    others = [
        asyncio.create_task(client.generate("Answer: ", max_tokens=TOKENS + 60, seed=seed, **options).result())
        for seed in range(BESIDE)
    ]
    await asyncio.sleep(0.3)
    gaps = await asyncio.gather(*(measured(client, seed) for seed in range(PLAIN)))
    await asyncio.gather(*others)
    return [gap for each in gaps for gap in each]


async def main(target: str) -> None:
    """Three rounds of each, in turn."""
    async with AsyncClient(target) as client:
        await round_of(client, grammars=True)
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(3):
            for grammars in found:
                found[grammars] += await round_of(client, grammars=grammars)
    for grammars, gaps in found.items():
        quantiles = statistics.quantiles(gaps, n=100)
        what = "grammar" if grammars else "plain"
        print(f"beside {BESIDE} {what} rows: ITL p50 {quantiles[49] * 1e3:.2f} ms, p99 {quantiles[98] * 1e3:.2f} ms")


asyncio.run(main(sys.argv[1]))
