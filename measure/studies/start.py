"""Time, CPU time and memory of a start: from the execution of `quire serve --model demo` to its line `ready`.

.venv/bin/python -m measure.studies.start --rounds 5 --json measure/results/start.json
.venv/bin/python -m measure.studies.start --tree . --tree ../before

A round measures `python -c "import torch"`, then each source tree. So changes in machine speed affect all of them, and
the ratio to the torch import in the same round is comparable between machines. Per tree:

* `ready_s`, `ratio`: wall time until the line `ready`, and relative to the import of torch in the same round.
* `said_s`: wall time until the first line on stderr that says what `quire serve` waits for; None without such a line.
* `cpu_s`, `rss_mib`: CPU time and resident memory of each process when the service is ready.
* `before_model`: CPU time, resident memory and modules of a worker before it loads a model.

Run it on a quiet machine with a warm file cache: the first round is not counted.
"""

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROLES = ("scheduler", "worker", "frontend")
_BEFORE_MODEL = """
import gc
gc.disable()  # as `quire worker` does
import worker_svc.main
import json, os, sys, time
rss = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
print(json.dumps({"cpu_s": time.process_time(), "rss_mib": rss / 1024, "modules": len(sys.modules)}), flush=True)
os._exit(0)
"""


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


def import_torch() -> dict[str, float]:
    """Return wall and CPU time of `python -c "import torch"`."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall_s": wall, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def before_model(tree: Path) -> dict[str, float]:
    """Return CPU time, memory and modules of a worker that has imported its program."""
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE_MODEL],
        cwd=tree,
        env=_environment(tree),
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def start(tree: Path, model: str, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Start a service, and stop it once it is ready."""
    arguments = ["serve", "--model", model, "--show-sample", "--grpc-port", "0", "--http-port", "0", *flags]
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "quire_server.cli.main", *arguments],
        cwd=tree,
        env=_environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said: list[float] = []
        lines: list[str] = []

        def read(stream: Any) -> None:
            for line in stream:
                said.append(time.monotonic() - began)
                lines.append(line)

        reader = threading.Thread(target=read, args=(process.stderr,))
        reader.start()
        try:
            line = process.stdout.readline()
            ready_s = time.monotonic() - began
            if not line.startswith("ready "):
                raise SystemExit(f"start: the service of {tree} did not get ready: {''.join(lines)[-2000:]}")
            found: dict[str, Any] = {"ready_s": ready_s, "said_s": None, "cpu_s": {}, "rss_mib": {}}
            if said and said[0] < ready_s and lines[0].startswith("starting "):
                found["said_s"] = said[0]
            for role, pid in {"supervisor": process.pid, **_children(process.pid)}.items():
                found["cpu_s"][role], found["rss_mib"][role] = _usage(pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
            reader.join()
    return found


def _children(pid: int) -> dict[str, int]:
    """Return the process IDs of a supervisor's children, by role."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        found.update({role: int(child) for role in _ROLES if role in words})
    return found


def _usage(pid: int) -> tuple[float, float]:
    """Return the CPU time that a process has used, in seconds, and its resident memory in MiB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def spread(values: Sequence[float]) -> str:
    """Return "median (least-most)" for some values."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def summary(torch: Sequence[Mapping[str, float]], rounds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the medians and ranges over a tree's rounds. `torch` contains the import of torch in the same rounds."""
    ratios = [each["ready_s"] / own["wall_s"] for each, own in zip(rounds, torch, strict=True)]
    rows = {"ready_s": spread([each["ready_s"] for each in rounds]), "ratio": spread(ratios)}
    said = [each["said_s"] for each in rounds]
    rows["said_s"] = "no line" if None in said else spread(said)
    for role in rounds[0]["cpu_s"]:
        rows[f"{role} cpu_s"] = spread([each["cpu_s"][role] for each in rounds])
        rows[f"{role} rss_mib"] = spread([each["rss_mib"][role] for each in rounds])
    for name in rounds[0]["before_model"]:
        rows[f"worker before a model {name}"] = spread([each["before_model"][name] for each in rounds])
    return rows


def main() -> None:
    """Measure, print a table, and write all rounds as JSON."""
    parser = argparse.ArgumentParser(prog="python -m measure.studies.start", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tree", action="append", type=Path, metavar="DIR", help="a source tree (default: this one)")
    parser.add_argument("--model", default="demo", help="the model to serve (default: demo)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rounds as JSON")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree or [Path(__file__).parents[2]]]
    torch: list[dict[str, float]] = []
    rounds: dict[str, list[dict[str, Any]]] = {str(tree): [] for tree in trees}
    for number in range(options.rounds + 1):
        own = import_torch()
        found = {str(tree): start(tree, options.model) | {"before_model": before_model(tree)} for tree in trees}
        if number == 0:
            continue
        torch.append(own)
        for name, each in found.items():
            rounds[name].append(each)
            print(
                f"round {number} {name}: ready {each['ready_s']:.2f} s, import torch {own['wall_s']:.2f} s", flush=True
            )
    print(f"import torch: wall_s {spread([each['wall_s'] for each in torch])}")
    for name, measured in rounds.items():
        print(f"\n{name}")
        for row, text in summary(torch, measured).items():
            print(f"  {row:36} {text}")
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))}
        content = {"machine": machine, "model": options.model, "import_torch": torch, "trees": rounds}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
