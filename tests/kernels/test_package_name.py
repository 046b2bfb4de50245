"""Our package shares its import name with a package that `transformers` probes for, and must run without triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: str) -> str:
    """The output of a Python program run as the worker is: from the repository root, which is importable."""
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


TRANSFORMERS = r"""
import sys, torch
import kernels
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
model = LlamaForCausalLM(config)
model.save_pretrained(sys.argv[1])
loaded = LlamaForCausalLM.from_pretrained(sys.argv[1])
prompt = torch.tensor([[1, 2, 3]])
args = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
assert torch.equal(model.generate(prompt, **args), loaded.generate(prompt, **args))
print(kernels.__file__, is_kernels_available(), loaded.generate(prompt, **args).shape[1], sep="\n")
"""


def test_transformers_works_beside_our_kernels(tmp_path: Path) -> None:
    """With our package importable as `kernels`, transformers saves, loads and generates without using it."""
    file, available, length = run(TRANSFORMERS, str(tmp_path)).splitlines()

    assert Path(file).parent == ROOT / "kernels"
    assert available == "False"
    assert length == "8"


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from kernels import _dispatch, activation, kv_cache, norm, paged_attention, philox, rotary, sampling
import worker_svc.main
assert not _dispatch.HAVE_TRITON
x = torch.ones(2, 4, 64)
cache = torch.zeros(2, 3, 4, 16, 64)
kv_cache.write_kv(x, x, cache[0], cache[1], torch.tensor([0, 16]))
out = paged_attention.paged_attention(
    x, cache[0], cache[1], torch.tensor([[0], [1]]).int(), torch.tensor([0, 1, 2]).int(),
    torch.tensor([1, 1]).int(), max_query_len=1, scale=1.0,
)
query, key = rotary.apply_rotary(out, out, torch.ones(2, 32), torch.zeros(2, 32))
print(norm.rms_norm(query, torch.ones(64), 0.0).sum().item())
print(activation.silu_mul(torch.zeros(2, 8)).sum().item())
"""


def test_cpu_paths_need_no_triton() -> None:
    """Where triton is not installed every operation still computes on CPU, and the worker's program can be imported."""
    total, zero = run(WITHOUT_TRITON).split()

    assert float(total) == 2 * 4 * 64
    assert float(zero) == 0.0
