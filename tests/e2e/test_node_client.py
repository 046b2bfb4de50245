"""A client that is not ours, in a language that is not ours: @grpc/grpc-js and the proto files, nothing else."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from measure.testbed.service import ROOT, Served
from quire import Client

SCRIPT = Path(__file__).with_name("node") / "stream.js"
PACKAGES = ROOT / "build" / "node" / "node_modules"

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="there is no node; install Node.js 18 or newer")
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="npm packages are missing; run make node-packages")
def test_a_node_client_streams(demo: Served) -> None:
    """Node reads the same tokens and text as Python does, in more than one message, and errors with code and field."""
    with Client(demo.grpc) as client:
        expected = client.generate("Once upon a time", max_tokens=40, temperature=0.0).result()
        request = {"text": "Once upon a time", "sampling": {"temperature": 0}, "stop": {"maxTokens": 40}}
        answer = _stream(demo.grpc, request)
        refusal = _stream(demo.grpc, {**request, "sampling": {"temperature": -1}})

    assert answer["error"] is None
    assert answer["text"] == expected.text
    assert answer["tokenIds"] == list(expected.token_ids)
    assert answer["messages"] > 2
    assert answer["finished"]["reason"] == "FINISH_REASON_" + expected.finished.reason.value.upper()
    assert refusal["error"]["code"] == "INVALID_ARGUMENT"
    assert "sampling.temperature" in refusal["error"]["details"]


def _stream(target: str, request: dict[str, Any]) -> dict[str, Any]:
    assert NODE is not None
    run = subprocess.run(
        [NODE, SCRIPT, target, ROOT / "protos", json.dumps(request)],
        # Proxy variables must not affect how a test connects to its own server.
        env={**os.environ, "NODE_PATH": str(PACKAGES), "no_grpc_proxy": "*", "no_proxy": "*"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer
