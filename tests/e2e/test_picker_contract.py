"""The contract of endpoint pickers: metrics, KV events and load reports as llm-d-router and vLLM's readers expect them.

The expectations come from llm-d-router's model-server protocol (docs/plugin-metric-protocol.md), from its adapter for
vLLM's KV events, and from xds.data.orca.v3.OrcaLoadReport.
"""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from measure.testbed.service import Served, free_ports, serve
from quire import Client, SchedulingOptions
from quire.v1 import generation_pb2 as v1
from tests.deploy.manifests import TOOLS, needs_tools

_WAIT_MS = 20_000
_PROMPT = list(range(40, 240))
_ORCA = """
import sys
from xds.data.orca.v3.orca_load_report_pb2 import OrcaLoadReport
report = OrcaLoadReport.FromString(sys.stdin.buffer.read())
print(report.application_utilization, sorted(report.named_metrics), len(report.ListFields()))
"""


class Picker:
    """A subscriber that decodes events as the router's adapter for vLLM does, and keeps its index."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._socket.subscribe(b"kv@")
        self.topics: set[str] = set()
        self.blocks: dict[bytes, tuple[int, ...]] = {}
        self.tokens: list[int] = []
        self._next: dict[str, int] = {}

    def take(self, wait_ms: int = _WAIT_MS) -> bool:
        """Apply one message; return whether one came."""
        if not self._socket.poll(wait_ms):
            return False
        topic, number, payload = self._socket.recv_multipart()
        prefix, frontend, model = topic.decode().split("@")
        assert prefix == "kv"
        self.topics.add(f"{frontend}@{model}")
        assert int.from_bytes(number, "big") == self._next.get(frontend, int.from_bytes(number, "big")), (
            "one is missing"
        )
        self._next[frontend] = int.from_bytes(number, "big") + 1
        timestamp, events, rank = msgpack.unpackb(payload)
        assert isinstance(timestamp, float)
        assert rank is None
        for tag, *fields in events:
            getattr(self, tag)(*fields)
        return True

    def AllBlocksCleared(self) -> None:
        """Forget everything."""
        self.blocks.clear()

    def BlockStored(
        self,
        hashes: list[bytes],
        parent: bytes | None,
        tokens: list[int],
        size: int,
        lora: None,
        medium: str,
        name: None,
    ) -> None:
        """Add blocks, whose parent must be known."""
        assert parent is None or parent in self.blocks
        assert len(tokens) == size * len(hashes)
        assert (lora, medium, name) == (None, "GPU", None)
        for number, each in enumerate(hashes):
            assert len(each) == 8
            self.blocks[each] = tuple(tokens[number * size : (number + 1) * size])
        self.tokens += tokens

    def BlockRemoved(self, hashes: list[bytes], medium: str) -> None:
        """Remove blocks, which must be known."""
        assert medium == "GPU"
        for each in hashes:
            del self.blocks[each]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def picked() -> Iterator[tuple[Served, Picker]]:
    """Yield a service with events and reports, and a picker that reads them."""
    (port,) = free_ports(1)
    picker = Picker(port)
    with serve("demo", f"--kv-events=tcp://127.0.0.1:{port}", "--load-reports") as served:
        yield served, picker
    picker.close()


def test_events_name_the_blocks_of_public_prompts_only(picked: tuple[Served, Picker]) -> None:
    """A picker learns blocks and tokens of a prompt without a scope, under each front end; a scoped one is secret."""
    served, picker = picked
    with Client(served.grpc) as client:
        client.generate(token_ids=_PROMPT, max_tokens=2).result()
        while len(picker.blocks) < len(_PROMPT) // 16:
            assert picker.take()
        secret = [each + 300 for each in _PROMPT]
        scoped = SchedulingOptions(cache_scope="team")
        client.generate(token_ids=secret, max_tokens=2, scheduling=scoped).result()
        # This request's events follow the events that must not appear.
        client.generate(token_ids=[7, *_PROMPT], max_tokens=2).result()
        while 7 not in picker.tokens:
            assert picker.take()

    assert {topic.partition("@")[2] for topic in picker.topics} == {"demo"}
    assert set(_PROMPT[:192]) <= set(picker.tokens)
    assert not set(secret) - set(_PROMPT) & set(picker.tokens)


def test_a_picker_finds_its_metrics(picked: tuple[Served, Picker]) -> None:
    """Each metric in the model-server protocol is a gauge with this name; its labels contain block size and count."""
    served, _ = picked
    families = {each.name: each for each in text_string_to_metric_families(served.metrics())}
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        (sample,) = families[name].samples

        assert families[name].type == "gauge"
        assert sample.name == name
        assert sample.labels["model_name"] == "demo"
    (config,) = families["vllm:cache_config_info"].samples

    assert int(config.labels["block_size"]) == 16
    assert int(config.labels["num_gpu_blocks"]) > 0
    assert 0 <= families["vllm:kv_cache_usage_perc"].samples[0].value <= 1


@needs_tools
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_responses_carry_the_load(picked: tuple[Served, Picker], tmp_path: Path) -> None:
    """GRPC has an OrcaLoadReport as a trailer; HTTP has the report as text, JSON or binary."""
    served, _ = picked
    headers = {wanted: _ask(served, wanted) for wanted in ("", "JSON", "BIN")}
    kind, _, report = headers["JSON"]["endpoint-load-metrics"].partition(" ")
    figures = json.loads(report)
    names = ["kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"]

    assert headers[""]["endpoint-load-metrics"].startswith("TEXT application_utilization=")
    assert "named_metrics.kv_cache_usage_perc=" in headers[""]["endpoint-load-metrics"]
    assert (kind, sorted(figures["named_metrics"])) == ("JSON", names)
    for text in (_trailer(served, tmp_path / "body"), headers["BIN"]["endpoint-load-metrics-bin"]):
        binary = base64.b64decode(text + "=" * (-len(text) % 4))
        parsed = subprocess.run([str(TOOLS / "python"), "-c", _ORCA], input=binary, capture_output=True, check=True)
        utilization, _, rest = parsed.stdout.decode().strip().partition(" ")

        assert 0 <= float(utilization) <= 2
        assert rest.startswith(str(names))


def _trailer(served: Served, body: Path) -> str:
    """Return the report in a call's trailer. gRPC's own clients keep it for load balancing."""
    request = v1.GenerateRequest(text="one", stop=v1.StopOptions(max_tokens=1))
    message = v1.GenerateOnceRequest(request=request).SerializeToString()
    body.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    command = [
        "curl", "--silent", "--noproxy", "*", "--http2-prior-knowledge", "--dump-header", "-", "--output", os.devnull,
        "--header", "content-type: application/grpc", "--header", "te: trailers", "--data-binary", f"@{body}",
        f"http://{served.grpc}/quire.v1.GenerationService/GenerateOnce",
    ]  # fmt: skip
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    trailers = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert trailers["grpc-status"] == "0"
    return trailers["endpoint-load-metrics-bin"]


def _ask(served: Served, wanted: str) -> Any:
    headers = {"endpoint-load-metrics-format": wanted} if wanted else {}
    with httpx.Client(trust_env=False, timeout=60) as client:
        body = {"model": "demo", "prompt": "one", "max_tokens": 1}
        answer = client.post(f"http://{served.http}/v1/completions", json=body, headers=headers)
    assert answer.is_success
    return answer.headers
