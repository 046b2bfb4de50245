"""Runs the same workloads on Quire and on other CPU servers in turn, and prints a comparison.

    python -m measure.peers --peers openvino,llama.cpp --rounds 3 --json measure/results/peers.json
    python -m measure.peers --weights int8 --rounds 3
    python -m measure.peers --shape lfm2 --workloads D1,D16 --peers llama.cpp,openvino --threads 1

Each peer is installed into its own environment under --work (gigabytes; llama.cpp is built from source). In each round
every server runs once, one at a time, in changing order. The results are medians with ranges over the rounds. Loading a
model is not timed, and every server serves a few requests before the clock starts.

If the --json file exists, the new rounds are added to it. A comparison can therefore be made in parts, one workload and
one round at a time, whenever the machine is idle for a few minutes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from measure.peers.figures import DifferentWorkError, Figures, compare, figures, table
from measure.peers.installation import PEERS, InstallationError, Installer, PeerSpec
from measure.peers.model import SHAPES, VOCAB_SIZE, make_model
from measure.peers.workloads import Workload, workloads, write_jsonl

US = "quire"
WEIGHTS = ("bf16", "int8", "int4")
_INSTRUCTION_SETS = ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8")
"""CPU flags that select the kernels."""
RUN_S = 1800.0
"""Timeout for all workloads of one peer, in seconds."""
_SAMPLE_S = 0.1


class RunError(Exception):
    """A peer did not finish its workloads."""


def main() -> int:
    """Install, serve and compare; return 1 if Quire itself could not be measured."""
    options = _options()
    chosen = {name: each for name, each in workloads(VOCAB_SIZE).items() if name in options.workloads.split(",")}
    work = options.work.resolve()
    model = options.model.resolve() if options.model else work / f"model-{options.shape}"
    make_model(model, shape=options.shape)
    files = {}
    for name, workload in chosen.items():
        files[name] = work / f"{name}.jsonl"
        write_jsonl(workload, files[name])

    installer = Installer(work, model)
    wanted = options.peers.split(",") if options.peers else []
    peers = [peer for peer in PEERS if peer.weights == options.weights and (not wanted or peer.name in wanted)]
    remarks: dict[str, str] = {}
    able: list[PeerSpec] = []
    for peer in peers:
        try:
            installer.install(peer)
            able.append(peer)
        except InstallationError as error:
            remarks[peer.name] = str(error)
            print(f"{peer.name}: {error}", file=sys.stderr)

    report = _begun(options)
    runs: dict[str, dict[str, list[Figures]]] = report["runs"]
    remarks |= report["remarks"]
    memory, versions = report["peak_rss_bytes"], report["versions"]
    report["remarks"] = remarks
    for name in chosen:
        runs.setdefault(name, {})
    done = max(len(runs[name].get(US, ())) for name in chosen)
    for number in range(done, done + options.rounds):
        order: list[PeerSpec | None] = [None, *able]
        order = order[number % len(order) :] + order[: number % len(order)]
        for each in order:
            name = US if each is None else each.name
            try:
                if each is None:
                    times = _run_quire(model, chosen, files, options, work, memory)
                else:
                    times, versions[name] = _run_peer(installer, each, chosen, files, options, work, memory)
                for workload in chosen.values():
                    result = figures(workload, times[workload.name])
                    runs[workload.name].setdefault(name, []).append(result)
                    print(f"round {number + 1} {name:16} {workload.name:4} {_line(result)}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1) + "\n")
            except (RunError, DifferentWorkError) as error:
                remarks[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    print(table(compare(runs)))
    return 0 if any(US in by_peer for by_peer in runs.values()) else 1


def _begun(options: argparse.Namespace) -> dict[str, Any]:
    """Return the content of the existing report."""
    flags = set(_cpuinfo("flags").split())
    machine = {
        "cpu": _cpuinfo("model name") or platform.processor(),
        "flags": [each for each in _INSTRUCTION_SETS if each in flags],
        "cores": os.cpu_count(),
        "threads": options.threads,
    }
    if options.json and options.json.exists():
        report: dict[str, Any] = json.loads(options.json.read_text())
        if (report["machine"], report["weights"]) != (machine, options.weights):
            raise SystemExit(f"--json: {options.json} was measured on another machine or with other weights")
        return report
    return {
        "machine": machine,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "weights": options.weights,
        "runs": {},
        "peak_rss_bytes": {},
        "versions": {},
        "remarks": {},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m measure.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="", help=f"which ones, with commas: {', '.join(p.name for p in PEERS)}")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="weight format of all servers")
    parser.add_argument("--workloads", default="W1,W2,W3,W3w,W4", help="which ones, with commas (all)")
    parser.add_argument("--rounds", type=int, default=3, help="how often everybody runs (3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads that compute (all cores)")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="where all of it lies (build/peers)")
    parser.add_argument("--shape", choices=SHAPES, default="llama", help="shape of the random model (llama)")
    parser.add_argument("--model", type=Path, help="checkpoint to use instead of a random model")
    parser.add_argument("--json", type=Path, help="file for the results; new results are added to it")
    options = parser.parse_args()
    known = {
        "peers": [peer.name for peer in PEERS if peer.weights == options.weights],
        "workloads": list(workloads(VOCAB_SIZE)),
    }
    for setting, names in known.items():
        given: str = getattr(options, setting)
        if unknown := set(filter(None, given.split(","))) - set(names):
            of = f" with {options.weights} weights" if setting == "peers" else ""
            parser.error(f"--{setting}: there is no {min(unknown)!r}{of}; there are {', '.join(names)}")
    return options


def _run_quire(
    model: Path, chosen: dict[str, Workload], files: dict[str, Path], options: argparse.Namespace, work: Path,
    memory: dict[str, int],
) -> dict[str, list[list[float]]]:  # fmt: skip
    times = {}
    for name, workload in chosen.items():
        out = work / f"{US}-{name}.json"
        command = [
            str(Path(sys.executable).with_name("quire")), "bench", "offline", "--model", str(model),
            "--requests", str(files[name]), "--max-concurrency", str(workload.max_concurrency), "--json", str(out),
            "--dtype", "bf16", "--quantization", "none" if options.weights == "bf16" else options.weights,
            "--num-threads", str(options.threads),
        ]  # fmt: skip
        _run(US, command, dict(os.environ), work, memory)
        answered = json.loads(out.read_text())["times"]
        times[name] = [each for each, asked in zip(answered, workload.requests, strict=True) if not asked.prime]
    return times


def _run_peer(
    installer: Installer, peer: PeerSpec, chosen: dict[str, Workload], files: dict[str, Path],
    options: argparse.Namespace, work: Path, memory: dict[str, int],
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:  # fmt: skip
    out = work / f"{peer.name}.json"
    arguments = [f"{name}:{workload.max_concurrency}:{files[name]}" for name, workload in chosen.items()]
    command = installer.command(peer, threads=options.threads, out=out, workloads=arguments)
    _run(peer.name, command, installer.environment(peer), work, memory)
    result = json.loads(out.read_text())
    return result["times"], result["versions"]


def _run(name: str, command: Sequence[str], environment: dict[str, str], work: Path, memory: dict[str, int]) -> None:
    """Run a command until it exits and record the peak memory of its process tree."""
    with (work / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        give_up = time.monotonic() + RUN_S
        while process.poll() is None:
            memory[name] = max(memory.get(name, 0), _resident(process.pid))
            if time.monotonic() > give_up:
                process.kill()
            time.sleep(_SAMPLE_S)
    if process.returncode:
        raise RunError(f"{command[0]} ended with {process.returncode}; see {log.name}")


def _resident(pid: int) -> int:
    total = 0
    try:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    except psutil.Error:
        pass  # The process has just exited.
    return total


def _line(result: Figures) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in result.items())


def _cpuinfo(field: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(field):
            return line.partition(":")[2].strip()
    return ""


if __name__ == "__main__":
    sys.exit(main())
