"""Models that compute different numbers have different fingerprints; the same model has the same one everywhere."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.kv_quantised import INT4
from measure.testbed.checkpoints import edit_config, make_checkpoint
from shared.config import ConfigError
from worker_svc.model.fingerprint import STRIDE_BYTES, fingerprint

FLOAT = torch.float32
WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("LlamaForCausalLM", tmp_path / "model")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change a checkpoint's tensors in place, without changing names, shapes and the file's size."""
    tensors = load_file(folder / WEIGHTS)
    size = (folder / WEIGHTS).stat().st_size
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert (folder / WEIGHTS).stat().st_size == size


def test_a_copy_is_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    """Where the files lie, and what else lies there, does not matter."""
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "README.md").write_text("hello")

    assert fingerprint(copy, FLOAT, with_weights=True) == fingerprint(checkpoint, FLOAT, with_weights=True)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_another_value_is_another_model(checkpoint: Path, name: str) -> None:
    """A one-bit change in one weight, in a small tensor or the last of a large one, changes the fingerprint."""
    before = fingerprint(checkpoint, FLOAT, with_weights=True)

    def flip_last_bit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.int32).flatten()[-1] ^= 1

    change_weights(checkpoint, flip_last_bit)

    assert fingerprint(checkpoint, FLOAT, with_weights=True) != before


def test_a_large_tensor_is_sampled_along_its_length(tmp_path: Path) -> None:
    """A model trained further differs however large its tensors are: each stride of a tensor is looked at."""
    (tmp_path / "config.json").write_text("{}")
    weights = torch.zeros(3 * STRIDE_BYTES // 4 + 5)
    prints = set()
    for stride in range(4):
        changed = weights.clone()
        changed[stride * STRIDE_BYTES // 4] = 1.0
        save_file({"large": changed, "small": torch.ones(3)}, tmp_path / WEIGHTS)
        prints.add(fingerprint(tmp_path, FLOAT, with_weights=True))

    assert len(prints) == 4


def test_another_dtype_is_another_model(checkpoint: Path) -> None:
    """KV of one type is not continued in another."""
    prints = {fingerprint(checkpoint, dtype, with_weights=True) for dtype in (FLOAT, torch.bfloat16, torch.float16)}
    prints.add(fingerprint(checkpoint, FLOAT, with_weights=True, kv_dtype=torch.uint8))
    prints.add(fingerprint(checkpoint, FLOAT, with_weights=True, kv_dtype=INT4))

    assert len(prints) == 5
    assert fingerprint(checkpoint, FLOAT, with_weights=True, kv_dtype=FLOAT) in prints


def test_another_configuration_is_another_model(checkpoint: Path) -> None:
    """The same weights under other settings compute other numbers, and random weights are not those of the file."""
    before = fingerprint(checkpoint, FLOAT, with_weights=True)
    assert fingerprint(checkpoint, FLOAT, with_weights=False) != before

    edit_config(checkpoint, lambda config: config.update(rms_norm_eps=0.1))

    assert fingerprint(checkpoint, FLOAT, with_weights=True) != before


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b"\xff", json.dumps({"x": {"data_offsets": [9, 3]}}).encode(), b'{"x": {"data_offsets": 7}}'],
)
def test_a_damaged_file_is_refused(tmp_path: Path, header: bytes) -> None:
    """What is no safetensors file gives one clear line."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(ConfigError, match="is damaged"):
        fingerprint(tmp_path, FLOAT, with_weights=True)
