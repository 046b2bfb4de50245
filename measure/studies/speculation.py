"""Speed of speculative decoding: tokens per second of `quire serve` with drafts, relative to no drafts.

.venv/bin/python -m measure.studies.speculation --rounds 5 --json measure/results/speculation.json
.venv/bin/python -m measure.studies.speculation --speculation draft --quantization int8

Two services run at the same time, one of them with `--speculation ngram` or `draft`. They serve the same requests in
turn, so only one of them works at any time. Each round gives one ratio per workload:

* `repetitive`: one request at a time whose greedy output repeats parts of its prompt and of itself.
* `free`: one request at a time, sampled at temperature 1.
* `full`: as many requests at once as the service has rows, sampled at temperature 1.
* `full repetitive`: as many at once, greedy.

`--model demo` is the small trained model that ships with Quire. By default the model is that of `measure.peers`: 335 M
random weights, whose greedy output soon repeats itself. Its steps take as long as those of a trained model of this
size.

`--draft-model` is the draft model of `--speculation draft`. By default it is a copy of the first layers of the served
model, with its embedding and head. Such a copy agrees with the model only by chance, so it shows what drafts cost. Pass
a trained model of the same family to see what drafts gain.
"""

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kernels.native.serving import native
from measure.peers.model import make_model
from measure.testbed.service import Served, serve
from quire import AsyncClient
from shared.model_path import DEMO_DRAFT, DEMO_MODEL, resolve_model

TEXT = (
    "The inventory of the house lists each room twice. Kitchen: one table, four chairs, one stove. Hall: one mirror,"
    " one lamp. Kitchen: one table, four chairs, one stove. Hall: one mirror, one lamp. Kitchen: one table, four"
)
_MAX_TOKENS, _FULL_TOKENS = 256, 96


def make_draft_model(model: Path, folder: Path, layers: int = 2) -> None:
    """Write a copy of a checkpoint with only its first layers, unless it exists."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def is_kept(name: str) -> bool:
        after = name.partition(".layers.")[2]
        return not after or int(after.partition(".")[0]) < layers

    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if is_kept(name)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


async def _generate(target: str, count: int, max_tokens: int, temperature: float, seed: int) -> float:
    """Send `count` requests at once; return their total tokens per second."""
    async with AsyncClient(target) as client:
        begin = time.perf_counter()
        generations = [
            client.generate(
                TEXT, max_tokens=max_tokens, temperature=temperature, seed=seed * 1000 + index, ignore_eos=True
            ).result()
            for index in range(count)
        ]
        await asyncio.gather(*generations)
        return count * max_tokens / (time.perf_counter() - begin)


def _workloads(rows: int) -> dict[str, Callable[[str, int], float]]:
    def run(count: int, max_tokens: int, temperature: float) -> Callable[[str, int], float]:
        return lambda target, seed: asyncio.run(_generate(target, count, max_tokens, temperature, seed))

    return {
        "repetitive": run(1, _MAX_TOKENS, 0.0),
        "free": run(1, _MAX_TOKENS, 1.0),
        "full": run(rows, _FULL_TOKENS, 1.0),
        "full repetitive": run(rows, _FULL_TOKENS, 0.0),
    }


def measure(off: Served, on: Served, rows: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return tokens per second per workload and service, one value per round. The first round is not counted."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, run in _workloads(rows).items():
        values: dict[str, list[float]] = {"off": [], "on": []}
        for turn in range(rounds + 1):
            services = [("off", off), ("on", on)]
            for mode, served in services if turn % 2 else reversed(services):
                rate = run(served.grpc, turn)
                if turn:
                    values[mode].append(round(rate, 2))
        found[name] = values
        ratios = [on / off for off, on in zip(values["off"], values["on"], strict=True)]
        print(
            f"{name:16} {statistics.median(ratios):5.2f} times ({min(ratios):.2f} to {max(ratios):.2f});"
            f" {statistics.median(values['off']):.1f} and {statistics.median(values['on']):.1f} tokens/s",
            flush=True,
        )
    return found


def main() -> None:
    """Run the workloads and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="'demo' or the folder of a checkpoint; default: random weights")
    parser.add_argument("--speculation", default="ngram", choices=("ngram", "draft"))
    parser.add_argument(
        "--draft-model", default="", help="for draft; default: demo's sibling, or the first two layers of the model"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32, help="requests at once in the full batch")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--json", type=Path)
    options, flags = parser.parse_known_args()
    model = options.model
    if not model:
        make_model(Path("build/speculation-model"))
        model = "build/speculation-model"
    drafts, draft_model = ["--speculation", options.speculation], ""
    if options.speculation == "draft":
        draft_model = options.draft_model
        if not draft_model and model == DEMO_MODEL:
            draft_model = DEMO_DRAFT
        elif not draft_model:
            served = resolve_model(model, weights=True)
            draft_model = f"build/speculation-draft-{served.name}"
            make_draft_model(served, Path(draft_model))
        drafts += ["--draft-model", draft_model]
    common = (
        "--max-num-seqs", str(options.rows), "--quantization", options.quantization,
        *flags,
    )  # fmt: skip
    with ExitStack() as stack:
        environ = {"QUIRE_NUM_THREADS": "0"}
        services = [
            stack.enter_context(serve(model, *common, *speculation, environ=environ))
            for speculation in (["--speculation", "off"], drafts)
        ]
        found = measure(services[0], services[1], options.rows, options.rounds)
    if options.json is not None:
        kernels = native()
        machine = {
            "machine": platform.machine(),
            "cpu_kernels": None if kernels is None else kernels.level_name,
            "torch": torch.__version__,
            "model": options.model or "random, 335 M",
            "quantization": options.quantization,
            "speculation": options.speculation,
            "draft_model": draft_model,
        }
        options.json.write_text(json.dumps({"conditions": machine, "tokens_per_s": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
