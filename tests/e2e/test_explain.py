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

SEED = int(os.environ.get("QUIRE_SEED") or random.SystemRandom().getrandbits(32))
"""What the release test draws from."""
_BRIEF = ("a tenant's limit", "neighbours with long prompts", "a cold prefix")
"""Causes of slowness that the default suite produces; the release test produces all ten."""


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


@pytest.mark.parametrize("name", _BRIEF)
def test_a_planted_cause_is_named_first(served: Served, name: str) -> None:
    """A cause is planted into the running service; `quire explain` names it first."""
    line, wrong = _plant(served, name, CAUSES[name], random.Random(name))

    print(line)
    assert not wrong, wrong


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_ten_planted_causes_are_named_first(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten causes in an order and with parameters drawn from a seed; `quire explain` names each of them first."""
    rng = random.Random(SEED)
    order = list(CAUSES)
    rng.shuffle(order)
    failures = []
    with capsys.disabled(), _service(tmp_path, "--swap-space=64MiB") as swapping:
        print(f"\nplanted causes of QUIRE_SEED={SEED}")
        for name in order:
            planted = CAUSES[name]
            line, wrong = _plant(swapping if planted.swaps else served, name, planted, rng)
            print(f"  {line}", flush=True)
            failures += [wrong] if wrong else []

    assert not failures, f"QUIRE_SEED={SEED}\n" + "\n".join(failures)
