"""`quire explain` against a running service: planted causes of slowness are named first, without knowledge of them.

`QUIRE_SEED=N make test-all ARGS=tests/e2e/test_explain.py` repeats the order and the parameters of a run.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncClient
from tests.checkpoints import make_checkpoint
from tests.e2e.harness import DEFAULTS, QUIRE, ROOT, Served, serve
from tests.e2e.planted import ADMISSION, CAUSES, FLAGS, MAX_LENGTH, Planted, Scene
from tests.examples import SEED


def _explain(served: Served, *arguments: str) -> str:
    """Run `quire explain` against the service; return what it prints."""
    done = subprocess.run(
        [*QUIRE, "explain", *arguments, f"--target={served.grpc}"],
        cwd=ROOT,
        env={**os.environ, **DEFAULTS},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def _explained(served: Served, request_id: str) -> Any:
    """Return the explanation of a request, once its front end's report is in the record."""
    end = time.monotonic() + 30
    while True:
        (found,) = json.loads(_explain(served, request_id, "--json"))["requests"]
        if (not found["live"] and found["link_error_s"] is not None) or time.monotonic() > end:
            return found


def _plant(served: Served, name: str, planted: Planted, rng: random.Random) -> tuple[str, str]:
    """Plant a cause; return one line about the outcome, and what is wrong with the explanation, or nothing."""

    async def main() -> Scene:
        async with AsyncClient(served.grpc) as client:
            scene = Scene(served, client, rng, f"r{rng.getrandbits(48):012x}")
            await planted.plant(scene)
        return scene

    scene = asyncio.run(main())
    found = _explained(served, scene.victim)
    causes = {each["cause"]: each["seconds"] for each in found["causes"]}
    drawn = ", ".join(f"{what} {value}" for what, value in scene.drawn.items())
    shares = ", ".join(f"{cause} {seconds:.3f} s" for cause, seconds in list(causes.items())[:3])
    line = f"{name} ({drawn}): {found['total_s']:.3f} s: {shares}"
    wrong = []
    if next(iter(causes)) not in planted.names:
        wrong.append(f"first is {next(iter(causes))!r}, not {' or '.join(map(repr, planted.names))}")
    if sum(causes.values()) != pytest.approx(found["total_s"], rel=0.01):
        wrong.append(f"the causes sum to {sum(causes.values()):.4f} s")
    if not found["would_have_helped"]:
        wrong.append("it does not say what would have helped")
    if not wrong:
        return line, ""
    return line, f"{line}\n{'; '.join(wrong)}\n{_explain(served, scene.victim)}"


@contextlib.contextmanager
def _service(folder: Path, *flags: str) -> Iterator[Served]:
    """A service with one worker, a record and tenants with limits."""
    admission = folder / "admission.toml"
    admission.write_text(ADMISSION, encoding="utf-8")
    checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model", max_position_embeddings=MAX_LENGTH)
    record = folder / "record"
    with serve(checkpoint, *FLAGS, f"--admission-file={admission}", f"--record-dir={record}", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service without swap space."""
    with _service(tmp_path_factory.mktemp("explain")) as running:
        yield running


@pytest.fixture(scope="module")
def swapping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with swap space."""
    with _service(tmp_path_factory.mktemp("explain"), "--swap-space=64MiB") as running:
        yield running


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", random.Random(SEED).sample(sorted(CAUSES), len(CAUSES)))
def test_a_planted_cause_is_named_first(name: str, request: pytest.FixtureRequest) -> None:
    """A cause is planted into the running service; `quire explain` names it first.

    The order of the causes and their parameters are drawn from the seed of the run.
    """
    planted = CAUSES[name]
    served = request.getfixturevalue("swapping" if planted.swaps else "served")

    line, wrong = _plant(served, name, planted, random.Random(f"{SEED} {name}"))

    print(line)
    assert not wrong, f"QUIRE_SEED={SEED}\n{wrong}"
