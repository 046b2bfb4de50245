"""Studies with the real service, and with `generate()` of transformers as the baseline with static batches.

Both serve the bundled model in float32 on the CPU, each with one thread, in turn. Tokens per second of CPU time hardly
depend on other programs of the machine, so claims use them. The best round of each system counts.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from measure.claims.virtual import Values
from measure.strategies import cases
from measure.testbed.service import QUIRE, ROOT, Served, serve
from quire import AsyncClient, Client
from shared.model_path import DEMO_DRAFT, DEMO_MODEL, resolve_model

_ROUNDS = 1
_COMPARED = ((cases.FOUR, 16), (cases.EXPONENTIAL, 40))
"""Workloads, and how many of their requests are served."""
_NAIVE_REQUESTS = 4
"""Requests that are also served one at a time."""
USERS = (1, 2, 4, 8, 16, 32, 64)
_REPETITIVE = (
    "The inventory of the house lists each room twice. Kitchen: one table, four chairs, one stove. Hall: one mirror,"
    " one lamp. Kitchen: one table, four chairs, one stove. Hall: one mirror, one lamp. Kitchen: one table, four"
)


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 1000, (count, cases.PROMPT_TOKENS), generator=generator).tolist()


@dataclass(frozen=True, slots=True)
class Speed:
    """Generated tokens per second."""

    per_s: float
    per_cpu_s: float
    """The same per second of CPU time."""


class _Generate:
    """`generate()` of transformers. Each row of a batch ends at a length of its own, as if it ended by itself."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        folder = resolve_model(DEMO_MODEL, weights=True)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def batch(self, prompts: list[list[int]], lengths: Sequence[int]) -> list[int]:
        """Return the tokens that each row generated until its end."""
        own, width = torch.tensor(lengths), cases.PROMPT_TOKENS

        def stops(tokens: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            return tokens.shape[1] - width >= own

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(lengths),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[stops],
            )
        assert found.shape[1] - width == max(lengths), "a static batch ends with its longest row"
        return list(lengths)

    def speed(self, prompts: list[list[int]], lengths: Sequence[int], slots: int) -> Speed:
        wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
        for first in range(0, len(prompts), slots):
            tokens += sum(self.batch(prompts[first : first + slots], lengths[first : first + slots]))
        return Speed(tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu))


async def _ask_all(target: str, prompts: list[list[int]], lengths: Sequence[int]) -> None:
    async with AsyncClient(target) as client:
        await asyncio.gather(
            *(
                client.generate(token_ids=prompt, max_tokens=length, ignore_eos=True, temperature=0).result()
                for prompt, length in zip(prompts, lengths, strict=True)
            )
        )


def _served_speed(served: Served, prompts: list[list[int]], lengths: Sequence[int]) -> Speed:
    wall, cpu = time.perf_counter(), _cpu_s(served)
    asyncio.run(_ask_all(served.grpc, prompts, lengths))
    return Speed(sum(lengths) / (time.perf_counter() - wall), sum(lengths) / (_cpu_s(served) - cpu))


def _cpu_s(served: Served) -> float:
    times = [process.cpu_times() for process in served.processes()]
    return sum(float(each.user + each.system) for each in times)


def generate() -> Values:
    """Return tokens per second of `generate()` in static batches, and of Quire at equal slots and at 64 rows.

    CPU time is that of all processes of the service.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        baseline = _Generate()
        return {workload.name: _compare(baseline, workload, count) for workload, count in _COMPARED}
    finally:
        torch.set_num_threads(threads)


def _compare(baseline: _Generate, workload: cases.Workload, count: int) -> Values:
    lengths, prompts = workload.lengths[:count], _prompts(count)
    few = min(count, _NAIVE_REQUESTS)
    common = ("--prefix-cache", "off", "--policy", "fcfs", "--dtype", "float32")
    with (
        serve(DEMO_MODEL, *common, "--max-num-seqs", str(workload.slots)) as equal,
        serve(DEMO_MODEL, *common, "--max-num-seqs", str(cases.MAX_ROWS)) as full,
    ):
        systems: dict[str, Callable[[], Speed]] = {
            "generate, static batches": lambda: baseline.speed(prompts, lengths, workload.slots),
            "generate, one request at a time": lambda: baseline.speed(prompts[:few], lengths[:few], 1),
            "quire, equal slots": lambda: _served_speed(equal, prompts, lengths),
            "quire, 64 rows": lambda: _served_speed(full, prompts, lengths),
        }
        for served in (equal, full):
            _served_speed(served, prompts[:1], [8])
        baseline.speed(prompts[:1], [8], 1)
        runs: dict[str, list[Speed]] = {name: [] for name in systems}
        for _ in range(_ROUNDS):
            for name, measure in systems.items():
                runs[name].append(measure())
    found: Values = {"requests": count, "slots": workload.slots, "tokens": sum(lengths)}
    for name, speeds in runs.items():
        found[name] = {
            "tokens_per_s": round(max(each.per_s for each in speeds), 1),
            "tokens_per_cpu_s": round(max(each.per_cpu_s for each in speeds), 1),
        }
    return found


def speculation(rounds: int = 15) -> Values:
    """Return the time to the first token and per further token of one request at a time, with and without drafts."""
    with (
        serve(DEMO_MODEL, "--speculation", "off") as off,
        serve(DEMO_MODEL, "--speculation", "ngram") as ngram,
        serve(DEMO_MODEL, "--speculation", "draft", "--draft-model", DEMO_DRAFT) as draft,
    ):
        found: dict[str, list[tuple[float, float]]] = {"off": [], "ngram": [], "draft": []}
        for turn in range(rounds + 1):
            for name, served in (("off", off), ("ngram", ngram), ("draft", draft)):
                times = _one(served, turn)
                if turn:
                    found[name].append(times)
    return {
        name: {
            "ttft_ms": round(1e3 * statistics.median(first for first, _ in times), 2),
            "tpot_ms": round(1e3 * statistics.median(each for _, each in times), 3),
        }
        for name, times in found.items()
    }


def _one(served: Served, turn: int) -> tuple[float, float]:
    """Return the time to the first token and the mean time per further token of a request, in seconds."""
    num_tokens = 192
    with Client(served.grpc) as client:
        begin = time.perf_counter()
        times = [
            (time.perf_counter(), len(chunk.token_ids))
            for chunk in client.generate(
                f"{turn}. {_REPETITIVE}", max_tokens=num_tokens, temperature=0, ignore_eos=True
            )
        ]
    first = next(at for at, count in times if count)
    return first - begin, (times[-1][0] - first) / (num_tokens - 1)


def batch_sizes() -> Values:
    """Return throughput and latency by concurrent users, from `quire bench sweep`, and the suggested batch size."""
    with (
        serve(DEMO_MODEL, "--max-num-seqs", str(USERS[-1])) as served,
        tempfile.TemporaryDirectory() as folder,
    ):
        file = Path(folder) / "sweep.json"
        subprocess.run(
            [
                *QUIRE, "bench", "sweep", "--target", served.grpc, "--users", "--loads", ",".join(map(str, USERS)),
                "--duration", "8", "--warmup", "1", "--max-repeats", "1", "--json", str(file),
            ],
            cwd=ROOT,
            check=True,
            stdout=sys.stderr,
        )  # fmt: skip
        sweep = json.loads(file.read_text("utf-8"))
    return {
        "knee": sweep["knee"],
        "results": {
            str(each["load"]): {
                "out_tok_per_s": round(each["out_tok_per_s"], 1),
                "itl_p99_s": round(each["itl_s"]["p99"], 4),
                "e2e_p99_s": round(each["e2e_s"]["p99"], 4),
            }
            for each in sweep["results"]
        },
    }
