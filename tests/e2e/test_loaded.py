"""No process of a service loads a module that reads recordings, measures or verifies, however long it serves."""

from pathlib import Path

import grpc
import pytest

from measure.testbed.service import serve
from quire import Client
from quire.admin.v1 import admin_pb2 as admin
from quire.admin.v1 import admin_pb2_grpc
from tests.house.test_imports import ABOVE_SERVING

_HOOK = """
import atexit, os, sys

def write_modules():
    if {"scheduler", "frontend", "worker"} & set(sys.orig_argv):
        with open(os.path.join(os.environ["QUIRE_TEST_MODULES"], str(os.getpid())), "w") as file:
            print(sys.orig_argv[sys.orig_argv.index("quire_server.cli.main") + 1], *sys.modules, file=file)

atexit.register(write_modules)
"""
"""Python runs this file at the start of every process; at its exit, a process writes its module names."""


@pytest.mark.every(3)
def test_a_scheduler_that_explained_a_request_has_loaded_no_reader(tmp_path: Path) -> None:
    """A scheduler that records, answers operators and explains loads no module of records, measure or checks."""
    (tmp_path / "sitecustomize.py").write_text(_HOOK)
    written = tmp_path / "modules"
    written.mkdir()
    environ = {"PYTHONPATH": str(tmp_path), "QUIRE_TEST_MODULES": str(written)}
    with serve("demo", environ=environ) as served, grpc.insecure_channel(served.grpc) as channel:
        operator = admin_pb2_grpc.AdminServiceStub(channel)
        with Client(served.grpc) as client:
            assert client.generate("2 + 2 =", max_tokens=4, request_id="explained").result().text
        explained = operator.Explain(admin.ExplainRequest(request_id="explained"), timeout=60)
        operator.ListWorkers(admin.ListWorkersRequest(), timeout=60)

    assert "explained" in explained.text
    modules = {path.read_text().split()[0]: set(path.read_text().split()[1:]) for path in written.iterdir()}
    assert "scheduler_svc.recorder.recorder" in modules["scheduler"]
    assert [name for names in modules.values() for name in names if name.split(".")[0] in ABOVE_SERVING] == []
