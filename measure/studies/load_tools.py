"""The same load from `quire bench serve`, GuideLLM and `vllm bench serve` in turn, on one running service.

make load-tools ARGS="--rounds 5 --json measure/results/load_tools.json"
make load-tools ARGS="--beside GuideLLM"

The other tools run in their environments of `make clients`. All call `/v1/completions` with the same rate (equal gaps),
number of requests, and lengths of prompt and output. Prompts differ, so the service has no prefix cache. The tools run
in turn, `--rounds` times, and each round begins with another one. The table has the mean over the rounds of each tool's
own mean, with its 95 % confidence interval.

TPOT is the time from the first to the last token per token after the first, which GuideLLM calls inter-token latency.
`quire bench serve` counts TTFT and e2e from the intended start, the others from sending.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure.load.figures import Interval
from measure.testbed.environments import Environment, InstallError
from measure.testbed.service import QUIRE, ROOT, serve

FIGURES = ("ttft_ms", "tpot_ms", "e2e_ms")
_TOKENIZER = ROOT / "shared" / "demo_model"
_TIMEOUT_S = 400
_VLLM = ROOT / "tests" / "clients" / "vllm_bench_python" / "vllm_cpu.py"


@dataclass(frozen=True, slots=True)
class Load:
    """The load that every tool sends."""

    url: str
    rate: float
    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Means:
    """A tool's means over the requests in one run, in ms."""

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    answered: int


class ToolError(Exception):
    """A tool did not run, or its report lacks a value."""


def run_quire(load: Load, seed: int, folder: Path, _: str) -> Means:
    """Run `quire bench serve`."""
    report = folder / "quire.json"
    flags = (
        f"--url={load.url}", "--constant", f"--rate={load.rate}", f"--requests={load.requests}",
        f"--input={load.prompt_tokens}", f"--output={load.output_tokens}", f"--seed={seed}", "--quiet",
        f"--json={report}",
    )  # fmt: skip
    _call([*QUIRE, "bench", "serve", *flags])
    found = json.loads(report.read_text())
    ttft, tpot, e2e = (1000 * found[name]["mean"] for name in ("ttft_s", "tpot_s", "e2e_s"))
    return Means(ttft, tpot, e2e, found["answered"])


def run_guidellm(load: Load, seed: int, folder: Path, python: str) -> Means:
    """Run GuideLLM."""
    report = folder / "guidellm.json"
    _call([
        python, "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={load.url},request_format=/v1/completions",
        "--tokenizer", f"kind=huggingface_auto,model={_TOKENIZER}",
        "--data", f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}",
        "--profile", f"kind=constant,rate={load.rate}",
        "--constraint", f"kind=max_requests,count={load.requests}",
        "--seed", f"kind=static,value={seed}",
        "--output", f"kind=json,path={report}",
        "--disable-progress",
    ])  # fmt: skip
    (found,) = json.loads(report.read_text())["benchmarks"]
    metrics = found["metrics"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return Means(
        mean("time_to_first_token_ms"),
        mean("inter_token_latency_ms"),
        1000 * mean("request_latency"),
        metrics["request_totals"]["successful"],
    )


def run_vllm(load: Load, seed: int, folder: Path, python: str) -> Means:
    """Run `vllm bench serve`."""
    report = folder / "vllm.json"
    _call([
        python, str(_VLLM), "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
        "--base-url", load.url, "--model", "demo", "--tokenizer", str(_TOKENIZER), "--dataset-name", "random",
        "--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.output_tokens),
        "--num-prompts", str(load.requests), "--request-rate", str(load.rate), "--burstiness", "10000",
        "--ignore-eos", "--temperature", "0", "--seed", str(seed), "--disable-tqdm", "--save-result",
        "--percentile-metrics", "ttft,tpot,e2el", "--result-dir", str(folder), "--result-filename", report.name,
    ])  # fmt: skip
    found = json.loads(report.read_text())
    return Means(found["mean_ttft_ms"], found["mean_tpot_ms"], found["mean_e2el_ms"], found["completed"])


RUNNERS = {"quire bench serve": run_quire, "GuideLLM": run_guidellm, "vllm bench serve": run_vllm}
_ENVIRONMENTS = {"GuideLLM": "guidellm_python", "vllm bench serve": "vllm_bench_python"}


def _call(command: list[str]) -> None:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"}
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{command[0]}: {error}") from None
    if run.returncode:
        raise ToolError(f"{' '.join(command[:4])}: exit code {run.returncode}: {(run.stderr or run.stdout)[-2000:]}")


def overlap(one: Interval, other: Interval) -> bool:
    """Return whether two confidence intervals overlap."""
    return abs(one.mean - other.mean) <= one.half_width + other.half_width


def summary(runs: dict[str, list[Means]]) -> dict[str, dict[str, Interval]]:
    """Return the interval of each number, by tool."""
    return {
        tool: {name: Interval.of([getattr(each, name) for each in found]) for name in FIGURES}
        for tool, found in runs.items()
    }


def table(intervals: dict[str, dict[str, Interval]]) -> str:
    """Return a Markdown table: ms ± half of the 95 % confidence interval, and whether the intervals overlap."""
    tools = list(intervals)
    lines = [f"| | {' | '.join(tools)} | intervals overlap |", "|---|" + "--:|" * len(tools) + "---|"]
    for name, title in zip(FIGURES, ("TTFT", "TPOT", "e2e"), strict=True):
        cells = [f"{intervals[tool][name].mean:.2f} ± {intervals[tool][name].half_width:.2f}" for tool in tools]
        is_equal = all(overlap(intervals[tools[0]][name], intervals[tool][name]) for tool in tools[1:])
        lines.append(f"| {title}, ms | {' | '.join(cells)} | {'yes' if is_equal else 'no'} |")
    return "\n".join(lines)


def main() -> int:
    """Run and print; return 0 if every tool got a response to every request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--beside", nargs="*", choices=_ENVIRONMENTS, default=list(_ENVIRONMENTS), help="other tools (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second (default: 4)")
    parser.add_argument("--requests", type=int, default=80, help="requests of each run (default: 80)")
    parser.add_argument("--input", type=int, default=64, help="prompt tokens (default: 64)")
    parser.add_argument("--output", type=int, default=16, help="output tokens (default: 16)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    programs = {"quire bench serve": ""}
    for tool in options.beside:
        environment = Environment(_ENVIRONMENTS[tool])
        try:
            environment.make()
        except InstallError as error:
            print(f"{tool}: {error}", file=sys.stderr)
            return 1
        programs[tool] = str(environment.target / "bin" / "python")
    runs: dict[str, list[Means]] = {tool: [] for tool in programs}
    with tempfile.TemporaryDirectory() as folder, serve("demo", "--prefix-cache=off") as served:
        load = Load(f"http://{served.http}", options.rate, options.requests, options.input, options.output)
        run_quire(load, 0, Path(folder), "")  # Warm up, because the service's first requests are slower.
        for number in range(options.rounds):
            order = list(programs)[number % len(programs) :] + list(programs)[: number % len(programs)]
            for tool in order:
                try:
                    means = RUNNERS[tool](load, number + 1, Path(folder), programs[tool])
                except ToolError as error:
                    print(f"{tool}: {error}", file=sys.stderr)
                    return 1
                runs[tool].append(means)
                print(f"round {number + 1}, {tool}: {means}", flush=True)
    intervals = summary(runs)
    print(table(intervals))
    if options.json:
        options.json.write_text(json.dumps(_document(options, runs, intervals), indent=1) + "\n")
    is_complete = all(each.answered == options.requests for found in runs.values() for each in found)
    return 0 if is_complete else 1


def _document(
    options: argparse.Namespace, runs: dict[str, list[Means]], intervals: dict[str, dict[str, Interval]]
) -> dict[str, Any]:
    return {
        "load": {name: getattr(options, name) for name in ("rate", "requests", "input", "output", "rounds")},
        "runs": {tool: [asdict(each) for each in found] for tool, found in runs.items()},
        "intervals": {
            tool: {name: interval.to_json() for name, interval in found.items()} for tool, found in intervals.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
