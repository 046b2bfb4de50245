"""GuideLLM: short runs of `guidellm run`, whose reports must have an answer with the right length for each request."""

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from probe import DEMO, KEY, RECITER, TOKENIZER, Probe, frees, run

PROBE = Probe("GuideLLM", "guidellm")
REQUESTS = 6
OUTPUT_TOKENS = 12


@cache
def benchmark(
    backend="", url=DEMO, key=KEY, prompt_tokens=24, output_tokens=OUTPUT_TOKENS, turns=1,
    limit=f"kind=max_requests,count={REQUESTS}",
):  # fmt: skip
    """Return the benchmark of a report, or fail with what the program wrote."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [
                sys.executable, "-m", "guidellm", "run",
                "--backend", f"kind=openai_http,target={url},api_key={key}{backend}",
                "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
                "--data",
                f"kind=synthetic_text,prompt_tokens={prompt_tokens},output_tokens={output_tokens},turns={turns}",
                "--profile", "kind=concurrent,streams=3",
                "--constraint", limit,
                "--output", f"kind=json,path={report}",
                "--disable-progress",
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stderr or done.stdout)[-400:]
        (found,) = json.loads(report.read_text())["benchmarks"]
        return found


def totals(found):
    """Return how many requests were answered, and how many failed."""
    counts = found["metrics"]["request_totals"]
    return counts["successful"], counts["errored"]


def answered(found):
    """Return the requests of a benchmark of which none failed."""
    assert totals(found) == (REQUESTS, 0), found["metrics"]["request_totals"]
    return found["requests"]["successful"]


@PROBE.tries("list models")
def _():
    # Without a name, GuideLLM takes the first model of the list.
    assert all('"demo"' in each["request_args"] for each in answered(benchmark()))


@PROBE.tries("create")
def _():
    found = benchmark(",stream=false,request_format=/v1/completions")
    assert all(each["output_metrics"]["text_tokens"] == OUTPUT_TOKENS for each in answered(found))


@PROBE.tries("stream")
def _():
    for backend in ("", ",request_format=/v1/completions"):
        assert all(each["output"] for each in answered(benchmark(backend)))


@PROBE.tries("usage in stream")
def _():
    assert all(each["output_metrics"]["text_tokens"] == OUTPUT_TOKENS for each in answered(benchmark()))


@PROBE.tries("embeddings")
def _():
    answered(benchmark(",request_format=/v1/embeddings"))


@PROBE.tries("previous_response_id")
def _():
    answered(benchmark(",request_format=/v1/responses,server_history=true", turns=2))


@PROBE.tries("error: unknown model")
def _():
    assert totals(benchmark(",model=gpt-4o")) == (0, REQUESTS)


@PROBE.tries("error: context overflow")
def _():
    assert totals(benchmark(prompt_tokens=4000)) == (0, REQUESTS)


@PROBE.tries("error: bad key")
def _():
    assert totals(benchmark(",model=demo", key="wrong")) == (0, REQUESTS)


@PROBE.tries("cancel")
def _():
    with frees(RECITER, 3):
        benchmark(url=RECITER, output_tokens=100_000, limit="kind=max_duration,seconds=3")


run(PROBE)
