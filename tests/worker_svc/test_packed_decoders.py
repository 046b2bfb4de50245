"""Decoders of `transformers` with packed bf16 weights: their logits are those of the same weights before packing."""

from pathlib import Path

import pytest
import torch

from checks.driver import CPU
from kernels.linear import PackedLinear
from kernels.native.library import Native
from kernels.native.serving import native
from measure.testbed.checkpoints import make_checkpoint
from shared.config import WorkerConfig
from worker_svc.model import hf, hf_packed
from worker_svc.model.base import AttentionInputs
from worker_svc.model.loader import load_model

LENGTHS = (40, 9)
TOLERANCE = 0.05
"""Of the largest logit. Sums in another order may round to another bf16 number."""


def logits_of(folder: Path) -> torch.Tensor:
    """Return the last logits of two prompts, in one step."""
    model, _ = load_model(WorkerConfig(model=str(folder), device="cpu", dtype="bfloat16"), CPU)
    caches = [
        (
            torch.zeros(2, shape.num_kv_heads, 64, shape.widths[0], dtype=torch.bfloat16),
            torch.zeros(2, shape.num_kv_heads, 64, shape.widths[1], dtype=torch.bfloat16),
        )
        for shape in model.kv_shapes
    ]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    attention = AttentionInputs(
        slot_mapping=torch.cat([64 * row + torch.arange(length) for row, length in enumerate(LENGTHS)]),
        block_tables=torch.tensor([[0], [1]], dtype=torch.int32),
        query_start=torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32),
        context_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        max_query_len=max(LENGTHS),
    )
    last = torch.tensor([LENGTHS[0] - 1, sum(LENGTHS) - 1])
    with torch.inference_mode():
        return model.forward(positions + 3, positions, attention, caches, last).float()


def difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the largest difference that packing makes to a logit, relative to the largest logit."""
    packed = logits_of(folder)
    with monkeypatch.context() as patch:
        patch.setattr(hf, "native", lambda: None)
        unpacked = logits_of(folder)
    return float((packed - unpacked).abs().max() / unpacked.abs().max())


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "DeepseekV3ForCausalLM", "FalconForCausalLM"])
def test_packing_does_not_change_logits_beyond_rounding(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a class of each interface, and one with latent attention."""
    if native() is None:
        pytest.skip("built without a compiler: nothing is packed")

    assert difference(make_checkpoint(architecture, tmp_path), monkeypatch) < TOLERANCE


def test_wrongly_packed_weights_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if each layer is packed with its outputs in another order."""
    if native() is None:
        pytest.skip("built without a compiler: nothing is packed")
    right = hf_packed._packed_copy

    def wrong(weight: torch.Tensor, bias: torch.Tensor | None, kernels: Native) -> PackedLinear:
        return right(weight.roll(1, 0), bias, kernels)

    monkeypatch.setattr(hf_packed, "_packed_copy", wrong)

    assert difference(make_checkpoint("Gemma2ForCausalLM", tmp_path), monkeypatch) > TOLERANCE
