"""Drills of an operator who inspects a cell under load with `quire` commands and a token."""

import base64
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from measure.testbed.service import until
from quire_server.cli.keys import add_principal
from tests.deploy.cell import Cell
from tests.deploy.manifests import ROOT

_PATIENCE_S = 120


def look_inside(cell: Cell) -> None:
    """`quire workers`, and the other commands, through each front end.

    Callers without the token are refused.
    """
    for front_end in cell.pods["frontend"]:
        workers = _quire(cell, "workers", at=front_end.address)
        _expect(all(each.name in workers for each in cell.pods["worker"]), workers)
        _expect("ROWS" in _quire(cell, "top", "--once", at=front_end.address).upper(), "top shows no rows")
        _quire(cell, "requests", at=front_end.address)
        slowest = _quire(cell, "explain", "--slowest", "3", at=front_end.address)
        _expect(len(slowest.splitlines()) >= 3, slowest)
        for token in ("", "unknown"):
            refused = _quire(cell, "workers", at=front_end.address, token=token, is_refused=True)
            _expect("admin = true" in refused, refused)
    inside = cell.pods["frontend"][0]
    read = "read -r QUIRE_TOKEN; export QUIRE_TOKEN\nexec quire workers --target localhost:50051 --tls-ca"
    found = cell.node.execute(inside, ["sh", "-c", f"{read} /etc/quire/tls/tls.crt"], f"{cell.operator_token}\n")
    _expect(cell.pods["worker"][0].name in found, found)
    cell.load.more(12)


def drain_a_worker(cell: Cell) -> None:
    """`quire drain WORKER`, and back; requests continue on another worker."""
    cell.add("worker")
    name = cell.pods["worker"][0].name
    _expect("drain" in _quire(cell, "drain", name), "the worker is not drained")
    cell.load.more(12)
    _expect("drain" not in _quire(cell, "drain", name, "--resume"), "the worker is still drained")
    cell.load.more(12)
    cell.remove("worker")
    cell.load.more(12)


def rotate_a_token(cell: Cell) -> None:
    """`quire keys token`: both tokens are valid, then the new one only; no process restarts."""
    old = cell.operator_token
    starts = [each.process.pid for each in cell.pods["frontend"]]
    # Equivalent to a manually added second hash: another principal with the same rights.
    new = add_principal(cell.principals, "operator-2", is_admin=True)
    cell.node.write("quire-principals", {"principals.toml": cell.principals.read_bytes()})
    for front_end in cell.pods["frontend"]:
        until(partial(_accepts, cell, front_end.address, new), "the front end knows the new token")
        _expect(_accepts(cell, front_end.address, old), "the old token is refused too early")
    text = cell.principals.read_text("utf-8")
    start = text.index("[principals.operator]")
    end = text.index("\n[", start)
    cell.principals.write_text(text[:start] + text[end:].lstrip(), "utf-8")
    cell.node.write("quire-principals", {"principals.toml": cell.principals.read_bytes()})
    for front_end in cell.pods["frontend"]:
        until(partial(_refuses, cell, front_end.address, old), "the front end refuses the old token")
    cell.operator_token = new
    _expect(starts == [each.process.pid for each in cell.pods["frontend"]], "a front end restarted")
    cell.load.more(12)


def save_state(cell: Cell) -> None:
    """`kubectl exec quire-scheduler-0 -- tar cf - -C /var/lib/quire journal record`, read elsewhere while it runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["sh", "-c", "tar cf - -C /var/lib/quire journal record | base64"]
        Path(folder, "state.tar").write_bytes(base64.b64decode(cell.node.execute(cell.scheduler, command)))
        with tarfile.open(Path(folder, "state.tar")) as archive:
            archive.extractall(folder, filter="data")
        record = f"{folder}/record"
        for arguments in (["record", "ls", record], ["explain", "--slowest", "10", "--record-dir", record]):
            command = [sys.executable, "-m", "quire_server.entry", *arguments]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_PATIENCE_S)
            _expect(done.returncode == 0 and len(done.stdout) > 20, done.stdout + done.stderr)
        _expect(bool(list(Path(folder, "journal").glob("*.journal"))), "no journal was saved")
    cell.load.more(12)


def _accepts(cell: Cell, address: str, token: str) -> bool:
    return _call(cell, ["workers"], address, token).returncode == 0


def _refuses(cell: Cell, address: str, token: str) -> bool:
    return not _accepts(cell, address, token)


def _quire(cell: Cell, *arguments: str, at: str = "", token: str | None = None, is_refused: bool = False) -> str:
    """Return what a command prints, as an operator calls it through a port-forward."""
    done = _call(
        cell, arguments, at or cell.pods["frontend"][0].address, cell.operator_token if token is None else token
    )
    _expect((done.returncode != 0) == is_refused, f"quire {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stderr if is_refused else done.stdout


def _call(cell: Cell, arguments: Sequence[str], address: str, token: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "quire_server.entry", *arguments, "--target", f"{address}:50051"]
    known = os.environ | {"QUIRE_TOKEN": token, "QUIRE_TLS_CA": str(cell.ca), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, env=known, capture_output=True, text=True, timeout=_PATIENCE_S)


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise RuntimeError(otherwise)
