"""`make gpu` rehearsed on a CPU: every part finishes, continues where it stopped, and computes correctly."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from measure.gpu import loads, shapes
from measure.gpu import results as results_module
from measure.gpu.__main__ import main
from measure.gpu.results import ENDED, DeviceLostError, Results
from measure.offline import OfflineRequest, Trace
from worker_svc.device.choice import set_threads

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    """A part takes all cores."""
    count = torch.get_num_threads()
    yield
    set_threads(count)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("part", "items"),
    [("kernels", 60), ("steps", 12), ("weights", 22), ("tiles", 1), ("decode", 5), ("workloads", 2), ("peers", 4)],
    ids=lambda value: str(value),
)
def test_a_part_runs_to_its_end(
    part: str, items: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tiny model, every item gives numbers; a second call finds them and runs nothing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    arguments = [part, "--rehearse", "--out", str(tmp_path)]
    assert main(arguments) == 0, capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())

    assert found["rehearsal"] is True
    assert {"device", "versions", "commit"} <= set(found)
    assert len(found["items"]) == items
    before = path.read_bytes()
    if part == "kernels":
        command = ["measure/gpu/run.sh", *arguments]
        environment = os.environ | {"GPU_PYTHON": sys.executable}
        again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert again.returncode == 0, again.stdout + again.stderr
        assert path.read_bytes() == before


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU is used only for a rehearsal, because its numbers must not look like a GPU's."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")

    assert main(["kernels", "--out", str(tmp_path)]) == 1
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_items_are_done_once_and_failures_do_not_stop_the_rest(tmp_path: Path) -> None:
    """The next process skips completed parts and repeats failed parts; without time left, no part begins."""
    path = tmp_path / "part.json"

    def fail() -> dict[str, float | int | str]:
        raise ValueError("no luck")

    first = Results(path, rehearsal=True, budget_s=100)
    first.run("one", lambda: {"x": 1.0})
    first.run("two", fail)
    first.run("three", lambda: {"x": 3.0}, 1000.0)
    second = Results(path, rehearsal=True, budget_s=100)
    second.run("one", fail)
    second.run("two", lambda: {"x": 2.0})

    assert (first.failed, first.skipped) == (["two"], ["three"])
    assert (second.failed, second.skipped) == ([], [])
    assert {name: item["x"] for name, item in second.items.items()} == {"one": 1.0, "two": 2.0}
    assert second.all_done(["one", "two"])
    assert not second.all_done(["three"])
    assert Results(path, rehearsal=False, budget_s=100).items == {}, "a rehearsal's figures are no measurement's"


def test_an_item_that_loses_the_device_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access nothing works in the process: it ends, and the next one does everything else."""
    path = tmp_path / "part.json"

    def crash() -> dict[str, float | int | str]:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(results_module, "_device_is_lost", lambda: True)
    first = Results(path, rehearsal=True, budget_s=100)
    first.run("one", lambda: {"x": 1.0})
    with pytest.raises(DeviceLostError):
        first.run("two", crash)
    second = Results(path, rehearsal=True, budget_s=100)
    for name in ("one", "two", "three"):
        second.run(name, lambda: {"x": 3.0})

    assert second.failed == ["two"]
    assert second.all_done(["one", "two", "three"])
    assert {name: item["x"] for name, item in second.items.items()} == {"one": 1.0, "three": 3.0}
    assert "illegal" in json.loads(path.read_text())["broken"]["two"]


def test_an_item_that_hangs_ends_the_process(tmp_path: Path) -> None:
    """What takes far too long is noted as broken before the process ends; the code says that there is more to do."""
    program = (
        "import sys, time; from pathlib import Path; from measure.gpu import results; results._LEAST_PATIENCE_S = 0.1;"
        " results.Results(Path(sys.argv[1]), rehearsal=True, budget_s=9).run('stuck', lambda: time.sleep(60))"
    )
    path = tmp_path / "part.json"
    command = [sys.executable, "-c", program, str(path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)

    assert process.returncode == ENDED, process.stderr
    assert "hung" in json.loads(path.read_text())["broken"]["stuck"]


def test_decode_counts_only_while_all_rows_decode() -> None:
    """Tokens before the last row has begun and after the first has ended belong to no full step."""
    slow = Trace(0.0, (1,) * 5, (1.0, 2.0, 3.0, 4.0, 5.0))
    early = Trace(0.0, (1,) * 5, (0.0, 0.5, 1.0, 2.0, 3.0))
    figures = loads.decode_figures([slow, early])

    assert figures == {"decode_tok_per_s": 2.0, "step_ms": 1000.0}
    with pytest.raises(ValueError, match="never all decoded"):
        loads.decode_figures([Trace(0.0, (1, 1), (0.0, 1.0)), Trace(0.0, (1, 1), (2.0, 3.0))])


def test_a_run_that_lost_a_token_has_no_throughput() -> None:
    """A run that lost a token has no throughput."""
    requests = [OfflineRequest((5, 6, 7), 2, ignore_eos=True)]

    assert loads.throughput_figures(requests, [Trace(0.0, (1, 2), (1.0, 2.0))], 2.0) == {
        "out_tok_per_s": 1.0,
        "total_tok_per_s": 2.5,
        "wall_s": 2.0,
    }
    with pytest.raises(ValueError, match="1 tokens were generated, but 2"):
        loads.throughput_figures(requests, [Trace(0.0, (1,), (1.0,))], 2.0)


def test_loads_are_what_they_are_called() -> None:
    """Lengths are within their bounds, nothing ends early, and the same call gives the same requests."""
    nano = loads.nano_vllm_load(256, 100, 1024, 32000)
    chats = loads.sharegpt_like_load(512, 1024, 32000)

    assert nano == loads.nano_vllm_load(256, 100, 1024, 32000)
    assert len(nano) == 256
    assert all(100 <= len(request.prompt) <= 1024 and 100 <= request.max_tokens <= 1024 for request in nano)
    assert all(request.ignore_eos for request in nano + chats)
    assert 150 < sum(len(request.prompt) for request in chats) / 512 < 280
    assert 130 < sum(request.max_tokens for request in chats) / 512 < 250


def test_shapes_have_the_sizes_of_their_models() -> None:
    """Llama-3.1-8B multiplies by 7.5 G weights a token and keeps 128 KiB of KV for it; its roof on an H100 is known."""
    shape = shapes.LLAMA_8B

    assert shape.matrix_elements == pytest.approx(7.50e9, rel=0.01)
    assert shape.kv_bytes_per_token == 128 << 10
    assert 1 / shape.decode_seconds(1, 1024, 3.35e12, 990e12) == pytest.approx(221, rel=0.03)
    assert shapes.QWEN_06B.matrix_elements == pytest.approx(0.596e9, rel=0.01)
    assert shape.prefill_flop(2048) == pytest.approx(2 * 2048 * 6.98e9, rel=0.1)
