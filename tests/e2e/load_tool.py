"""`make load-test`: guidellm, a load tool that knows nothing of Quire, drives its OpenAI API; no request may fail.

    python -m tests.e2e.load_tool PATH_OF_GUIDELLM

It takes half a minute, most of it guidellm's own start, so it is no part of `make test`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.harness import ROOT, serve

REQUESTS = 60


def main(guidellm: str) -> int:
    """Runs it; 0 when every request was answered."""
    with tempfile.TemporaryDirectory() as folder, serve("demo") as served:
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                guidellm, "run",
                "--backend", f"kind=openai_http,target=http://{served.http}",
                "--tokenizer", f"kind=huggingface_auto,model={ROOT / 'shared' / 'demo_model'}",
                "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=48",
                "--profile", "kind=concurrent,streams=8",
                "--constraint", f"kind=max_requests,count={REQUESTS}",
                "--output", f"kind=json,path={report}",
                "--disable-progress",
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"},
            check=True,
        )  # fmt: skip
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        print(f"guidellm: {totals['successful']} answered, {totals['errored']} failed")
        return 0 if totals["successful"] == REQUESTS and not totals["errored"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
