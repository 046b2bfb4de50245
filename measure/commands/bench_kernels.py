"""Measures the worker's kernels on this machine's device.

The table compares them with the achieved copy bandwidth, the achieved rate of a matrix product, and torch's attention.
Sizes are those of Llama-3.1-8B on a GPU. On a CPU the sizes are tiny, because the result says nothing about the GPU's
kernels; the table is then marked as a rehearsal. "of roof" is the shortest possible time divided by the measured time.
The shortest possible time follows from the bytes and operations of the kernel, and from the measured copy bandwidth and
rate of matrix products.
"""

import json
from dataclasses import asdict
from pathlib import Path

from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire bench kernels --json kernels.json
"""


def configure(parser: OneLineParser) -> None:
    """Add the benchmark's flags."""
    add = parser.add_argument
    add("--device", default="auto", help="'auto', 'cpu' or 'cuda[:N]' (default: auto)")
    add("--only", default="", metavar="TEXT", help="run only the measurements whose name contains TEXT")
    add("--json", type=Path, metavar="FILE", help="write the result to this file as well")


def run(options: Namespace) -> int:
    import torch

    from measure.kernels.bench import LLAMA_8B, TINY, measure_ceilings, measurements
    from worker_svc.device.choice import choose_device, describe_device

    device = choose_device(options.device)
    rehearsal = device.type == "cpu"
    dtype, sizes = (torch.float32, TINY) if rehearsal else (torch.bfloat16, LLAMA_8B)
    print(f"{describe_device(device)}{': a rehearsal with tiny sizes, not a measurement' if rehearsal else ''}")
    with torch.inference_mode():
        ceilings = measure_ceilings(device, dtype, sizes)
        copy, gemm = ceilings.copy_bytes_per_s / 1e12, ceilings.gemm_flop_per_s / 1e12
        print(f"copy {copy:.3f} TB/s, matrix product {gemm:.1f} TF/s")
        print(f"{'µs':>10} {'TB/s':>7} {'TF/s':>7} {'of roof':>8} {'peer µs':>10}  what")
        rows = []
        for name, measure in measurements(device, dtype, sizes):
            if options.only not in name:
                continue
            found = measure()
            rows.append(asdict(found) | {"of_roof": found.share(ceilings)})
            peer = f"{found.peer_seconds * 1e6:10.1f}" if found.peer else " " * 10
            print(
                f"{found.seconds * 1e6:10.1f} {found.bytes / found.seconds / 1e12:7.3f}"
                f" {found.flop / found.seconds / 1e12:7.2f} {found.share(ceilings):8.1%} {peer}  {name}",
                flush=True,
            )
    if options.json:
        result = {
            "device": describe_device(device),
            "rehearsal": rehearsal,
            "torch": torch.__version__,
            "ceilings": asdict(ceilings),
            "kernels": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0
