"""Tries the features of foreign clients against real services, prints the tables and writes the outcomes as JSON.

make clients                                        # all clients; the outcomes are in build/clients/outcomes.json
make clients ARGS="--only openai_python"            # the clients of some folders
make clients ARGS="--publish"                       # also write measure/results/clients.json and docs/clients.md
.venv/bin/python -m tests.clients --relock openai_python      # newest versions into the locks of some folders
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measure.testbed.environments import BUILD, Environment, InstallError, environments
from measure.testbed.service import ROOT, Served, serve
from tests.clients.matrix import Outcome, matrix_of, tables, to_json
from tests.e2e.reciting_model import EOS, make_reciter

PUBLISHED = ROOT / "measure" / "results" / "clients.json"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- begin: make clients ARGS=--publish -->", "<!-- end -->"
PROGRAM_S = 1800
_KEY = "key-of-the-matrix"
_RECITALS = (
    ("<think>", "I add", " 3 and", " 4.", "</think>", "The answer", " is 7.", EOS),
    ("<|assistant|>", "The answer"),
    ("<|forever|>", " and on", " and on,", " and on"),
)
"""Responses of a model that reasons about everything, and that never stops if a message contains "forever"."""
_TEMPLATE = (
    "{% set asked = namespace(forever=false) %}{% for message in messages %}"
    "{% if message.content and 'forever' in message.content %}{% set asked.forever = true %}{% endif %}"
    "[{{ message.role }}]{{ message.content or '' }}{% endfor %}"
    "{% if add_generation_prompt %}{% if asked.forever %}<|forever|>"
    "{% elif enable_thinking is defined and not enable_thinking %}<|assistant|>{% else %}<think>{% endif %}{% endif %}"
)


def main() -> int:
    """Run the matrix; 0 when no feature failed."""
    names = [each.name for each in environments()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="folders of clients (default: all)")
    parser.add_argument("--features", nargs="+", default=[], help="features to try (default: all)")
    parser.add_argument("--relock", nargs="+", choices=names, default=[], help="write the locks of these folders anew")
    parser.add_argument("--publish", action="store_true", help="write the outcomes and the tables of the documentation")
    options = parser.parse_args()
    try:
        for name in options.relock:
            Environment(name).lock_again()
        if options.relock:
            return 0
        chosen = [Environment(name) for name in options.only]
        for each in chosen:
            each.make()
    except InstallError as error:
        print(f"clients: {error}", file=sys.stderr)
        return 1
    outcomes = list(_outcomes(chosen, options.features))
    matrix = matrix_of(outcomes)
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "outcomes.json").write_text(to_json(matrix))
    print(tables(matrix))
    if options.publish:
        PUBLISHED.write_text(to_json(matrix))
        PAGE.write_text(with_tables(PAGE.read_text(), tables(matrix)))
    failed = [each for each in outcomes if each.result == "fail"]
    passed = sum(each.result == "pass" for each in outcomes)
    print(f"{len(matrix)} clients: {passed} features work, {len(failed)} do not")
    return 1 if failed else 0


def with_tables(page: str, tables: str) -> str:
    """Return the page with these tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n{END}{rest.partition(END)[2]}"


def _outcomes(chosen: list[Environment], features: list[str]) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="quire-clients-") as name:
        folder = Path(name)
        principals = folder / "principals.toml"
        principals.write_text(f'[principals.client]\ntokens = ["{hashlib.sha256(_KEY.encode()).hexdigest()}"]\n')
        reciter = make_reciter(folder / "reciter", _RECITALS, _TEMPLATE)
        flags = (f"--principals={principals}",)
        with serve("demo", *flags) as demo, serve(reciter, "--parser=hermes", *flags) as reciting:
            for each in chosen:
                yield from _run(each, demo, reciting, features)


def _run(environment: Environment, demo: Served, reciter: Served, features: list[str]) -> Iterator[Outcome]:
    """Run an environment's program; return its output."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        "CLIENTS_DEMO": f"http://{demo.http}",
        "CLIENTS_RECITER": f"http://{reciter.http}",
        "CLIENTS_GRPC": demo.grpc,
        "CLIENTS_KEY": _KEY,
        "NO_PROXY": "*",
    }
    environ.pop("PYTHONPATH", None)
    log = BUILD / f"{environment.name}.log"
    with log.open("w") as errors:
        run = subprocess.run(
            [*environment.command(), *features], cwd=environment.target, env=environ, stdout=subprocess.PIPE,
            stderr=errors, text=True, timeout=PROGRAM_S, check=False,
        )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith('{"client"')]
    if run.returncode or not lines:
        raise RuntimeError(f"{environment.name}: exit code {run.returncode}; see {log}:\n{log.read_text()[-2000:]}")
    for line in lines:
        outcome = Outcome(**json.loads(line))
        print(f"{outcome.client}: {outcome.feature}: {outcome.result} {outcome.reason}", flush=True)
        yield outcome


if __name__ == "__main__":
    sys.exit(main())
