"""Models whose weights stay quantised, as on a GPU, against the same models with dequantised weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.quantised_checkpoints import make_gguf, make_pair
from measure.testbed.storages import bytes_of
from tests.cpu_kernels import cpu_kernels
from tests.worker_svc.test_capacity import predicted_memory
from tests.worker_svc.test_packed import load, logits_of

TOKENS = [list(range(5, 10)), [7]]


@pytest.fixture(autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    with torch.inference_mode(), cpu_kernels("off"):
        yield


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance of logits."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "layout",
    ["gptq-int4", "gptq-int4-zeros", "awq", "ct-int8-channel", "ct-int8-grouped", "ct-int4-small", "fp8-block"],
)
def test_a_quantised_checkpoint_gives_the_logits_of_its_dequantised_weights(layout: str, tmp_path: Path) -> None:
    """All matrices stay quantised, and the model takes less memory."""
    pair = make_pair(layout, tmp_path)
    plain = load(pair.plain, dtype="float32")
    with capture_logs() as logs:
        model = load(pair.quantised, dtype="float32")

    assert [(log["as_stored"], log["dequantised"]) for log in logs if "as_stored" in log] == [(14, 0)]
    assert distance(logits_of(model, TOKENS, torch.float32), logits_of(plain, TOKENS, torch.float32)) < 1e-5
    assert bytes_of(model) < 0.6 * bytes_of(plain)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M"])
def test_a_gguf_file_gives_the_logits_of_its_dequantised_weights(kind: str, tmp_path: Path) -> None:
    """Matrices stay quantised, also those whose parts have different types; the embedding is dequantised."""
    pair = make_gguf(kind, tmp_path)
    with capture_logs() as logs:
        model = load(pair.quantised, dtype="float32")
    found, expected = (logits_of(each, TOKENS, torch.float32) for each in (model, load(pair.plain, dtype="float32")))

    assert [(log["as_stored"], log["dequantised"]) for log in logs if "as_stored" in log] == [(15, 1)]
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize(("kind", "bound", "share"), [("int8", 0.05, 0.45), ("int4", 0.5, 0.35)])
def test_weights_are_quantised_at_load(kind: str, bound: float, share: float, tmp_path: Path) -> None:
    """`--quantization` works without the CPU kernels: logits stay near, and the model takes less memory."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path, hidden_size=256, intermediate_size=512)
    plain, model = load(folder, dtype="float32"), load(folder, dtype="float32", quantization=kind)

    assert distance(logits_of(model, TOKENS, torch.float32), logits_of(plain, TOKENS, torch.float32)) < bound
    assert bytes_of(model) < share * bytes_of(plain)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        *((layout, {}) for layout in ("gptq-int4", "gptq-int4-zeros", "awq", "ct-int8-channel", "ct-fp8-channel")),
        *(("none", {"quantization": kind}) for kind in ("int8", "int4")),
        *((kind, {}) for kind in ("Q4_0", "Q4_K_M")),
    ],
)
def test_weights_take_the_memory_that_is_predicted(layout: str, flags: dict[str, str], tmp_path: Path) -> None:
    """`quire capacity` for a GPU counts weights that stay quantised within 3 %."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    if layout == "none":
        folder = make_checkpoint("LlamaForCausalLM", tmp_path / "model", **sizes)
    elif layout.startswith("Q"):
        folder = make_gguf(layout, tmp_path, **sizes).quantised
    else:
        folder = make_pair(layout, tmp_path, **sizes).quantised
    options = [f"--{name}={value}" for name, value in flags.items()]
    found = predicted_memory(
        tmp_path, folder, "--context=64", "--output=8", "--dtype=bfloat16", *options, memory=("--gpu-memory=9GB",)
    )

    weights = bytes_of(load(folder, dtype="bfloat16", **flags))
    assert found["weights_bytes"] == pytest.approx(weights, rel=0.03)
