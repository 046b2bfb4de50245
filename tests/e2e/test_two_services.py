"""Two models on one machine: two services of one user with separate records, consoles and explanations."""

import json
import os
import subprocess
import urllib.request
from pathlib import Path

import pytest

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import DEFAULTS, QUIRE, ROOT, Served, free_ports, serve
from quire import Client


@pytest.mark.every(3)
def test_two_services_of_one_user_can_both_be_looked_into(tmp_path: Path) -> None:
    """Each service records to a separate folder; commands and console show the service to which they connect."""
    models = [make_checkpoint("LlamaForCausalLM", tmp_path / name) for name in ("small", "other")]
    ports = free_ports(4)
    place = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with (
        serve(models[0], f"--grpc-port={ports[0]}", f"--http-port={ports[1]}", environ=place) as first,
        serve(models[1], f"--grpc-port={ports[2]}", f"--http-port={ports[3]}", environ=place) as second,
    ):
        for served, model in ((first, "small"), (second, "other")):
            with Client(served.grpc) as client:
                client.generate("the", max_tokens=4, ignore_eos=True).result()
            assert model in _quire(served, "models")
            assert "worker-0" in _quire(served, "top", "--once")
            assert len(_quire(served, "explain", "--slowest", "3").splitlines()) > 1
            assert _console_shows_steps(served)
        records = sorted(
            path.name for path in (tmp_path / "state" / "quire" / "record").iterdir() if any(path.iterdir())
        )

    assert records == sorted((str(ports[0]), str(ports[2])))


def _quire(served: Served, *arguments: str) -> str:
    done = subprocess.run(
        [*QUIRE, *arguments, f"--target={served.grpc}"], cwd=ROOT, env={**os.environ, **DEFAULTS, "COLUMNS": "200"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def _console_shows_steps(served: Served) -> bool:
    """Return whether the console's page and its first data are there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{served.http}/", timeout=30) as answer:
        page: bytes = answer.read()
    request = urllib.request.Request(
        f"http://{served.http}/console/api/watch", json.dumps({}).encode(), {"Content-Type": "application/json"}
    )
    with opener.open(request, timeout=30) as answer:
        return b"console" in page.lower() and bool(answer.read(1))
