"""`make other-server`: `quire bench` measures a server that knows nothing of Quire, with the bundled model as GGUF.

    python -m tests.e2e.other_server llama-cpp-python PYTHON
    python -m tests.e2e.other_server xllamacpp PYTHON

PYTHON is an environment with the server's package, gguf and safetensors. `quire bench serve` sends texts and chats in
an open and a closed loop, and `quire bench sweep` sends two loads. Every request must get a response. Where the server
itself counts generated tokens, the counts must be equal. The test starts in seconds and takes a minute, but its
environment is large, so `make test` does not include it.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from measure.testbed.service import ROOT, free_ports

_START_S = 120
_SLOTS, _CONTEXT = 8, 2048
_LLAMA_CPP = f"""
import signal, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
params.n_parallel, params.n_ctx, params.endpoint_metrics = {_SLOTS}, {_SLOTS * _CONTEXT}, True
server = xllamacpp.Server(params)
signal.pause()
"""
"""llama.cpp's own server, which batches continuously."""
COMMANDS = {
    "xllamacpp": ("-c", _LLAMA_CPP, "{model}", "{port}"),
    # This server handles one request at a time. By default, a new request aborts the running one.
    "llama-cpp-python": (
        "-m", "llama_cpp.server", "--model", "{model}", "--host", "127.0.0.1", "--port", "{port}",
        "--n_ctx", str(_CONTEXT), "--interrupt_requests", "False",
    ),
}  # fmt: skip
"""Arguments of Python, by the package that has the server."""
_COUNTER = "llamacpp:tokens_predicted_total"
LOADS = {
    "texts, open loop": ("--rate=4", "--requests=40"),
    "texts, closed loop": ("--concurrency=4", "--requests=20"),
    "chats, open loop": ("--prompts=chat", "--rate=4", "--requests=20"),
    "texts, shared prefix": ("--rate=4", "--requests=20", "--shared-prefix=64"),
}


class OtherServerError(Exception):
    """An error in the server or in the benchmark."""


@contextlib.contextmanager
def served(package: str, python: str, folder: Path) -> Iterator[str]:
    """A running server; yields its URL."""
    model, log = folder / "demo.gguf", folder / "server.log"
    converted = [python, str(ROOT / "tests/e2e/gguf_model.py"), str(ROOT / "shared/demo_model"), str(model)]
    subprocess.run(converted, check=True)
    (port,) = free_ports(1)
    arguments = [each.format(model=model, port=port) if "{" in each[:2] else each for each in COMMANDS[package]]
    with log.open("wb") as file:
        process = subprocess.Popen([python, *arguments], stdout=file, stderr=file, env={**os.environ, "no_proxy": "*"})
    try:
        _await(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise OtherServerError(f"server: it ended with {process.returncode}; its log ends so:\n{_end_of(log)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise OtherServerError(f"server: no answer after {_START_S} s; its log ends so:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def quire_bench(command: str, url: str, file: Path, *flags: str) -> dict[str, Any]:
    """Run `quire bench COMMAND`, print its table, return its report."""
    arguments = ["bench", command, f"--url={url}", "--input=64", "--output=16", "--quiet", f"--json={file}", *flags]
    result = subprocess.run(
        [str(Path(sys.executable).parent / "quire"), *arguments], capture_output=True, text=True, check=False
    )
    print("\n".join(f"    {line}" for line in result.stdout.splitlines()), flush=True)
    if result.returncode:
        raise OtherServerError(f"quire {' '.join(arguments)}: exit code {result.returncode}: {result.stderr.strip()}")
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def generated(url: str) -> int | None:
    """Return the server's count of generated tokens; None if it does not count them."""
    page = httpx.get(f"{url}/metrics", trust_env=False)
    for line in page.text.splitlines() if page.status_code == 200 else ():
        if line.startswith(_COUNTER):
            return int(float(line.split()[1]))
    return None


def check_serve(url: str, name: str, flags: Sequence[str], folder: Path) -> list[str]:
    """Measure one load; return the errors in the report."""
    print(f"quire bench serve, {name}:", flush=True)
    before = generated(url)
    report = quire_bench("serve", url, folder / "serve.json", "--prompts=text", *flags)
    after = generated(url)
    requests = next(int(flag.partition("=")[2]) for flag in flags if flag.startswith("--requests"))
    wrong = []
    if (report["answered"], report["failed"]) != (requests, 0):
        wrong.append(f"{report['answered']} of {requests} requests were answered, failures: {report['failures']}")
    if before is not None and after is not None:
        # Each probe before the run asked for one or two tokens.
        probes = after - before - report["out_tokens"]
        if not 0 <= probes <= 8:
            wrong.append(f"the server counts {after - before} tokens, the report {report['out_tokens']} and probes")
    if not 0 < report["ttft_s"]["p50"] <= report["e2e_s"]["p50"]:
        wrong.append(f"TTFT {report['ttft_s']['p50']} s and e2e {report['e2e_s']['p50']} s cannot both be right")
    return [f"serve, {name}: {each}" for each in wrong]


def check_sweep(url: str, folder: Path) -> list[str]:
    """Measure two loads; return the errors in the report."""
    print("quire bench sweep:", flush=True)
    flags = ("--loads=2,4", "--duration=5", "--warmup=0", "--max-repeats=1", "--slo=e2e_ms=60000")
    page = folder / "sweep.html"
    report = quire_bench("sweep", url, folder / "sweep.json", *flags, f"--html={page}")
    wrong = []
    if [each["load"] for each in report["results"]] != [2, 4] or any(each["failed"] for each in report["results"]):
        wrong.append(f"two loads without failures were expected: {report['results']}")
    if report["highest_kept"] != 4:
        wrong.append(f"a limit of a minute was not kept: {report['conclusions']}")
    if page.read_text().count("<svg") < 5:
        wrong.append("the page lacks plots")
    return [f"sweep: {each}" for each in wrong]


def main(package: str, python: str) -> int:
    """Run all; 0 when nothing was wrong."""
    if package not in COMMANDS:
        print(f"package: {package!r} is unknown; use {' or '.join(COMMANDS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with served(package, python, folder) as url:
                wrong = [each for load, flags in LOADS.items() for each in check_serve(url, load, flags, folder)]
                wrong += check_sweep(url, folder)
        except OtherServerError as error:
            wrong = [str(error)]
    print("\n".join(wrong) or f"{package}: every request was answered and counted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
