"""Run one part of the GPU measurements: `python -m measure.gpu PART`, see `measure.gpu`."""

import argparse
import os
import sys
import time
from pathlib import Path

from measure.gpu.results import ENDED, DeviceLostError, Results, device_name


def main(arguments: list[str] | None = None) -> int:
    """Run one part and return the exit code.

    0: complete; 1: something failed; 3: items remain, run the command again; 4: an item terminated the process, and the
    next process continues without this item.
    """
    parser = argparse.ArgumentParser(prog="python -m measure.gpu", description="Run the measurements that need a GPU.")
    parser.add_argument("part", choices=("kernels", "steps", "weights", "tiles", "decode", "workloads", "peers"))
    parser.add_argument("--rehearse", action="store_true", help="with a tiny model, on a CPU if there is no GPU")
    parser.add_argument(
        "--budget-s", type=float, default=420.0, help="seconds after which no item starts (default: 420)"
    )
    parser.add_argument("--out", type=Path, default=Path("measure/results"), help="folder of the JSON")
    options = parser.parse_args(arguments)
    # Triton reads this variable when it compiles, both here and in the worker. Kernels compiled for one part are thus
    # reused by the next.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path("build/gpu/triton").absolute()))

    import torch

    from measure.gpu.parts import FULL, PARTS, REHEARSAL, Context
    from worker_svc.device.choice import set_threads

    if not torch.cuda.is_available() and not options.rehearse:
        print("there is no GPU here; --rehearse runs the same with a tiny model on the CPU", file=sys.stderr)
        return 1
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    set_threads(0)
    name = f"gpu-{options.part}{'-rehearsal' if options.rehearse else ''}.json"
    until = float(os.environ.get("QUIRE_GPU_UNTIL", "inf"))  # An earlier process may have used some of the time.
    budget_s = min(options.budget_s, until - time.time())
    results = Results(options.out / name, rehearsal=options.rehearse, budget_s=budget_s)
    print(f"{options.part} on {device_name()}" + (" (rehearsal)" if options.rehearse else ""), flush=True)
    scale = REHEARSAL if options.rehearse else FULL
    try:
        PARTS[options.part](Context(device, scale, results))
    except DeviceLostError as error:
        print(f"the device stopped responding after: {error}", flush=True)
        return ENDED
    for item in results.skipped:
        print(f"  {item}: no time left")
    print(f"{len(results.items)} items in {options.out / name}")
    if results.failed:
        return 1
    if results.skipped:
        print("run the same command again to continue")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
