"""The comparison with peers: all servers get the same work, and every figure matches its name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from measure.offline import read_requests
from measure.peers import model
from measure.peers.figures import DifferentWorkError, compare, figures
from measure.peers.installation import PEERS, Installer
from measure.peers.model import SHAPES
from measure.peers.workloads import PeerRequest, Workload, workloads, write_jsonl

_ECHO = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from pace import main

class Peer:
    def __init__(self, options):
        self.live = {}

    def start(self, index, request):
        assert len(self.live) < 2, "more than were allowed at once"
        self.live[index] = request["max_tokens"]

    def poll(self):
        updates = []
        for index in list(self.live):
            self.live[index] -= 1
            updates.append((index, 1, not self.live[index]))
            if not self.live[index]:
                del self.live[index]
        return updates

main(Peer, lambda: {"echo": "1"})
"""


def test_everybody_is_asked_for_the_same() -> None:
    """The same seed gives the same requests, and no two workloads share a prefix that one could leave in a cache."""
    first, second = workloads(1000), workloads(1000)
    assert first == second
    starts = [r.prompt_token_ids[:16] for each in ("W3", "W3w") for r in first[each].requests[4:]]
    assert len(set(starts)) == 2
    assert sum(request.max_tokens for request in first["W2"].requests if not request.prime) == 128


def test_our_own_benchmark_reads_the_workloads(tmp_path: Path) -> None:
    """`quire bench offline` accepts the file that is written for the peers."""
    workload = workloads(1000)["W4"]
    write_jsonl(workload, tmp_path / "w.jsonl")
    read = read_requests(tmp_path / "w.jsonl")
    assert [(r.prompt, r.max_tokens, r.arrive_s, r.prime) for r in read] == [
        (r.prompt_token_ids, r.max_tokens, r.arrive_s, r.prime) for r in workload.requests
    ]


def test_an_adapter_serves_within_the_limit_and_times_every_token(tmp_path: Path) -> None:
    """The adapters' common part lets in as many as may be in flight, primes first, and reports a time per token."""
    requests = (PeerRequest((1,), 3, prime=True), *(PeerRequest((index,), index + 1) for index in range(5)))
    write_jsonl(Workload("w", 2, requests), tmp_path / "w.jsonl")
    script, out = tmp_path / "echo.py", tmp_path / "out.json"
    script.write_text(_ECHO)
    adapters = Path(__file__).parents[2] / "measure/peers/adapters"
    flags = ["--model", "m", "--variant", "v", "--threads", "1", "--out", str(out), f"w:2:{tmp_path / 'w.jsonl'}"]
    subprocess.run([sys.executable, str(script), str(adapters), *flags], check=True, timeout=60)
    result = figures(Workload("w", 2, requests), _times(out))
    assert result["out_tok_per_s"] > 0


def test_missing_tokens_are_no_result() -> None:
    """A peer that stops early is not fast."""
    workload = Workload("W1", 1, (PeerRequest((1,), 3),))
    with pytest.raises(DifferentWorkError, match="asked for"):
        figures(workload, [[0.1, 0.2]])


def test_requests_that_never_decode_together_are_no_result() -> None:
    """The decode speed of several rows needs a time when all of them decode."""
    with pytest.raises(DifferentWorkError, match="D16: no time"):
        figures(Workload("D16", 2, (PeerRequest((1,), 2), PeerRequest((2,), 2))), [[1.0, 2.0], [2.5, 3.0]])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_is_written_for_every_shape(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape has between 330 and 360 million parameters, in names that its class in `transformers` expects."""
    saved: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(model, "_make_tokenizer", lambda folder, seed: None)
    monkeypatch.setattr(model, "save_file", lambda weights, path, metadata: saved.update(weights))
    model.make_model(tmp_path, shape=shape)
    assert 330e6 < sum(each.numel() for each in saved.values()) < 360e6
    maker: Any = AutoModelForCausalLM
    with torch.device("meta"):
        expected = set(maker.from_config(AutoConfig.from_pretrained(tmp_path)).state_dict()) - {"lm_head.weight"}
    assert set(saved) == expected


def test_models_with_one_name_are_converted_to_different_files(tmp_path: Path) -> None:
    """The converted model of a peer belongs to one checkpoint, also if another has the same folder name."""
    paths = set()
    for parent in ("a", "b"):
        installer = Installer(tmp_path, tmp_path / parent / "model")
        for peer in PEERS:
            command = installer.command(peer, threads=1, out=tmp_path / "out", workloads=())
            paths.add((peer.name, command[command.index("--model") + 1]))
    assert len(paths) == 2 * len(PEERS)


def test_figures_of_decoding_and_gaps() -> None:
    """Decode speed counts tokens while all requests decode; the gap counted is the largest after the long prompt."""
    one = figures(Workload("W2", 1, (PeerRequest((1,), 3),)), [[1.0, 1.5, 2.0]])
    assert one["decode_tok_per_s"] == pytest.approx(2.0)
    assert one["out_tok_per_s"] == pytest.approx(1.5)
    two = Workload("D16", 2, (PeerRequest((1,), 4), PeerRequest((2,), 3)))
    assert figures(two, [[1.0, 2.0, 3.0, 9.0], [1.5, 2.5, 4.0]])["decode_tok_per_s"] == pytest.approx(4 / 2.5)
    both = Workload("W4", 2, (PeerRequest((1,), 4), PeerRequest((2,), 1, arrive_s=3.0)))
    gaps = figures(both, [[0.5, 2.5, 3.5, 4.0], [3.75]])
    assert gaps["max_gap_s"] == pytest.approx(1.0)
    assert gaps["long_ttft_s"] == pytest.approx(0.75)


def test_ratios_say_how_much_better_we_are() -> None:
    """Medians over the rounds are compared; for gaps, shorter is better."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        "W1": {"quire": [{"out_tok_per_s": v} for v in (10, 30, 20)], "other": [{"out_tok_per_s": 10.0}]},
        "W4": {
            "quire": [{"max_gap_s": 0.5, "long_ttft_s": 1.0, "out_tok_per_s": 5.0}],
            "other": [{"max_gap_s": 2.0, "long_ttft_s": 1.0, "out_tok_per_s": 5.0}],
        },
    }
    ratios = {(row.workload, row.figure, row.peer): row.ratio for row in compare(runs)}
    assert ratios["W1", "out_tok_per_s", "other"] == 2.0
    assert ratios["W4", "max_gap_s", "other"] == 4.0
    assert ratios["W4", "max_gap_s", "quire"] == 1.0


def _times(out: Path) -> list[list[float]]:
    times: list[list[float]] = json.loads(out.read_text())["times"]["w"]
    return times


@pytest.mark.parametrize("flag", ["--peers=openvino-int8", "--workloads=W9"])
def test_an_unknown_peer_or_workload_is_refused_before_an_installation(flag: str, tmp_path: Path) -> None:
    """The error names the known peers and workloads."""
    command = [sys.executable, "-m", "measure.peers", f"--work={tmp_path}", flag]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert flag.partition("=")[2] in refused.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
