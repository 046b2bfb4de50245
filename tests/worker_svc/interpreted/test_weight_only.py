"""Models whose weights stay quantised, as on a GPU, against the same models with dequantised weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from kernels.experts import mix_experts_reference
from kernels.fp8_linear import Fp8Weight, fp8_linear_reference
from measure.testbed.checkpoints import SLIDING_WINDOW, make_checkpoint
from measure.testbed.quantised_checkpoints import make_gguf, make_mxfp4, make_pair
from measure.testbed.storages import bytes_of
from tests.cpu_kernels import cpu_kernels
from tests.worker_svc.test_capacity import predicted_memory
from tests.worker_svc.test_packed import load, logits_of
from worker_svc.model import llama_layer, weight_only
from worker_svc.model.llama import LlamaModel

TOKENS = [list(range(5, 10)), [7]]
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [],
}
"""Sizes of mixtures in which groups of 64 inputs fit."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    with torch.inference_mode(), cpu_kernels("off"):
        yield


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance of logits."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "layout",
    ["gptq-int4", "gptq-int4-zeros", "awq", "ct-int8-channel", "ct-int8-grouped", "ct-int4-small", "fp8-block",
     "ct-nvfp4", "ct-mxfp4", "modelopt-nvfp4"],
)  # fmt: skip
def test_a_quantised_checkpoint_gives_the_logits_of_its_dequantised_weights(layout: str, tmp_path: Path) -> None:
    """All matrices stay quantised, and the model takes less memory."""
    pair = make_pair(layout, tmp_path)
    plain = load(pair.plain, dtype="float32")
    with capture_logs() as logs:
        model = load(pair.quantised, dtype="float32")

    assert [(log["as_stored"], log["dequantised"]) for log in logs if "as_stored" in log] == [(14, 0)]
    assert distance(logits_of(model, TOKENS, torch.float32), logits_of(plain, TOKENS, torch.float32)) < 1e-5
    assert bytes_of(model) < 0.6 * bytes_of(plain)


@pytest.mark.parametrize("layout", ["none", "mxfp4"])
def test_own_code_computes_gpt_oss(layout: str, tmp_path: Path) -> None:
    """Sinks, windows, biases and clamped experts give the logits of `transformers`; experts in MXFP4 stay quantised."""
    pair = make_mxfp4(tmp_path, intermediate_size=96, hidden_size=96)
    oracle = AutoModelForCausalLM.from_pretrained(pair.plain, dtype=torch.float32, attn_implementation="eager")
    rows = [list(range(5, 5 + 2 * SLIDING_WINDOW)), [7]]
    expected = torch.cat([oracle(torch.tensor([row])).logits[0] for row in rows])
    with capture_logs() as logs:
        model = load(pair.quantised if layout == "mxfp4" else pair.plain, dtype="float32")
    found = logits_of(model, rows, torch.float32)

    assert isinstance(model, LlamaModel)
    held = [(log["as_stored"], log["dequantised"]) for log in logs if "as_stored" in log]
    assert held == ([(16, 0)] if layout == "mxfp4" else [])
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize(
    "architecture",
    [
        "MixtralForCausalLM",
        *(pytest.param(f"Qwen{number}MoeForCausalLM", marks=pytest.mark.release) for number in (2, 3)),
    ],
)
@pytest.mark.parametrize("layout", ["gptq-int4-zeros", "ct-int8-channel", "ct-nvfp4", "fp8-block"])
def test_experts_stay_quantised(layout: str, architecture: str, tmp_path: Path) -> None:
    """Mixtures give the logits of their dequantised weights, and take less memory."""
    pair = make_pair(layout, tmp_path, architecture, only="experts", **EXPERTS)
    plain, model = load(pair.plain, dtype="float32"), load(pair.quantised, dtype="float32")

    assert distance(logits_of(model, TOKENS, torch.float32), logits_of(plain, TOKENS, torch.float32)) < 1e-5
    assert bytes_of(model) < 0.7 * bytes_of(plain)


def test_experts_without_a_common_form_are_dequantised(tmp_path: Path) -> None:
    """If one expert is not quantised, all experts of its layer have the model's type, and the log says so."""
    pair = make_pair("ct-nvfp4", tmp_path, "MixtralForCausalLM", only="experts")
    files = [folder / "model.safetensors" for folder in (pair.plain, pair.quantised)]
    plain, stored = map(load_file, files)
    name = "model.layers.0.block_sparse_moe.experts.2.w1"
    stored = {key: tensor for key, tensor in stored.items() if not key.startswith(f"{name}.")}
    save_file(stored | {f"{name}.weight": plain[f"{name}.weight"]}, files[1], {"format": "pt"})
    with capture_logs() as logs:
        model = load(pair.quantised, dtype="float32")
    found, expected = (logits_of(each, TOKENS, torch.float32) for each in (model, load(pair.plain, dtype="float32")))

    assert [(log["as_stored"], log["dequantised"]) for log in logs if "as_stored" in log] == [(16, 7)]
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize(
    "layout", ["fp8-block-128", "ct-fp8-channel", pytest.param("fp8-tensor", marks=pytest.mark.release)]
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_products_in_e4m3_are_those_of_the_reference(
    architecture: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on sm_89: matrices and experts stay in e4m3, and activations are rounded to e4m3 as in the reference."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    if "Moe" in architecture:
        sizes |= {"moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 2}
    pair = make_pair(layout, tmp_path, architecture, **sizes)
    monkeypatch.setattr(weight_only, "multiplies_e4m3", lambda _: True)
    model = load(pair.quantised, dtype="float32")
    found, plain = (logits_of(each, TOKENS, torch.float32) for each in (model, load(pair.plain, dtype="float32")))
    monkeypatch.setattr(llama_layer, "fp8_linear", fp8_linear_reference)
    monkeypatch.setattr(llama_layer, "mix_experts", mix_experts_reference)
    expected = logits_of(model, TOKENS, torch.float32)

    layer = vars(model)["_layers"][0]
    assert isinstance(layer.qkv.codes[0], Fp8Weight)
    assert architecture == "LlamaForCausalLM" or isinstance(layer.mlp.gate_up, Fp8Weight)
    # An activation in the middle between two codes may be rounded either way.
    assert distance(found, expected) < 0.02
    assert distance(found, plain) < 0.15


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M"])
def test_a_gguf_file_gives_the_logits_of_its_dequantised_weights(kind: str, tmp_path: Path) -> None:
    """Matrices stay quantised, also those whose parts have different types; the embedding is dequantised."""
    pair = make_gguf(kind, tmp_path)
    with capture_logs() as logs:
        model = load(pair.quantised, dtype="float32")
    found, expected = (logits_of(each, TOKENS, torch.float32) for each in (model, load(pair.plain, dtype="float32")))

    assert [(log["as_stored"], log["dequantised"]) for log in logs if "as_stored" in log] == [(15, 1)]
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize(
    ("kind", "in_e4m3", "bound"), [("int8", False, 0.1), ("int4", False, 0.8), ("fp8", False, 0.25), ("fp8", True, 0.4)]
)
def test_weights_are_quantised_at_load(
    kind: str, in_e4m3: bool, bound: float, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--quantization` works without the CPU kernels: logits stay near, and the model takes less memory.

    With products in e4m3, as on sm_89, fp8 also rounds activations.
    """
    monkeypatch.setattr(weight_only, "multiplies_e4m3", lambda _: in_e4m3)
    share = 0.35 if kind == "int4" else 0.45
    folder = make_checkpoint(architecture, tmp_path, hidden_size=256, intermediate_size=384, num_hidden_layers=1)
    plain, model = load(folder, dtype="float32"), load(folder, dtype="float32", quantization=kind)

    assert distance(logits_of(model, TOKENS, torch.float32), logits_of(plain, TOKENS, torch.float32)) < bound
    assert bytes_of(model) < share * bytes_of(plain)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        *((layout, {}) for layout in ("gptq-int4", "gptq-int4-zeros", "awq", "ct-int8-channel", "ct-fp8-channel")),
        *((layout, {}) for layout in ("ct-nvfp4", "ct-mxfp4", "modelopt-nvfp4", "experts", "mxfp4")),
        *(("none", {"quantization": kind}) for kind in ("int8", "int4", "fp8")),
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
    elif layout == "mxfp4":
        folder = make_mxfp4(tmp_path, **sizes).quantised
    elif layout == "experts":
        folder = make_pair("ct-nvfp4", tmp_path, "MixtralForCausalLM", **sizes).quantised
    else:
        folder = make_pair(layout, tmp_path, **sizes).quantised
    options = [f"--{name}={value}" for name, value in flags.items()]
    found = predicted_memory(
        tmp_path, folder, "--context=64", "--output=8", "--dtype=bfloat16", *options, memory=("--gpu-memory=9GB",)
    )

    weights = bytes_of(load(folder, dtype="bfloat16", **flags))
    assert found["weights_bytes"] == pytest.approx(weights, rel=0.03)
