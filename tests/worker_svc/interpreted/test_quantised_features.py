"""Weights that stay quantised, in pairs with the features of a GPU worker: interpreted kernels and captured steps.

Every form of weights occurs with every value of each feature: speculation, swapping, tensor parallelism, and quantised
KV. The oracle is `transformers` with dequantised weights, and with the rounding of KV and activations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checks.driver import Driver, make_engine
from checks.oracle import NEAR_TIE, Oracle, Tally
from kernels import fp8_linear, weight_only
from kernels.weight_only import Kind
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.quantised_checkpoints import make_gguf, make_mxfp4, make_pair
from shared.columns import to_column
from tests.covering import covering
from tests.worker_svc.fake_accelerator import FakeAccelerator
from tests.worker_svc.ranks import Ranks, ranks
from worker_svc.model import weight_only as loading

FEATURES = {
    "weights": (
        *("gptq-int4", "ct-int8-grouped", "awq", "fp8-block", "ct-nvfp4", "modelopt-nvfp4", "ct-mxfp4", "Q4_K_M"),
        *("experts in int4", "experts in nvfp4", "gpt-oss", "int8", "int4", "fp8", "fp8 in e4m3", "blocks in e4m3"),
    ),
    "speculation": ("ngram", "off"),
    "swap": ("swapped", "resident"),
    "ranks": ("2", "1"),
    "kv": ("auto", "int8"),
}
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
ACTIVATIONS_TIE = 0.5
"""A rounded activation between two codes of e4m3 may be rounded either way."""
CASES = [
    pytest.param(case, id="-".join(case.values()), marks=[pytest.mark.release] * (index % 5 > 0))
    for index, case in enumerate(covering(FEATURES))
]


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint to serve, the flag to quantise it at load, and the dequantised weights."""

    folder: Path
    plain: Path
    quantization: str = "none"


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two ranks."""
    with ranks(2) as started:
        yield started


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_dequantised_model(case: dict[str, str], pair: Ranks, tmp_path: Path) -> None:
    """Greedy tokens of chunks, captured decode steps, drafts and swapped rows are the oracle's."""
    in_e4m3, num_ranks = case["weights"].endswith("e4m3"), int(case["ranks"])
    model = make_model(case["weights"], num_ranks, tmp_path)
    oracle = Oracle(model.plain, kv=case["kv"], tie=ACTIVATIONS_TIE if in_e4m3 else NEAR_TIE)
    if in_e4m3:
        round_activations(oracle, num_ranks, block=128 if case["weights"].startswith("blocks") else 0)
    settings: dict[str, Any] = {
        "block_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "dtype": "float32",
        "host_cache": "1MiB" if case["swap"] == "swapped" else "0", "speculation": case["speculation"],
        "kv_cache_dtype": case["kv"], "quantization": model.quantization,
    }  # fmt: skip
    if num_ranks == 2:
        with pair.driver(model.folder, accelerated=True, in_e4m3=in_e4m3, **settings) as driver:
            answers = run(driver, case)
    else:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(loading, "multiplies_e4m3", lambda _: in_e4m3)
            engine = make_engine(model.folder, accelerator=FakeAccelerator(), **settings)
        answers = run(Driver(engine), case)

    tally = Tally()
    for prompt, answer in answers:
        assert len(answer) >= 4
        oracle.check_greedy(prompt, answer, tally)
    print(f"{tally.near_ties} near ties in {tally.tokens} tokens")
    assert tally.near_ties * 3 <= tally.tokens, tally


def run(driver: Driver, case: dict[str, str]) -> list[tuple[list[int], list[int]]]:
    """Compute two rows in chunks and decode steps; return prompts and answers."""
    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], [9, 10, 11]]
    for row, prompt in enumerate(prompts):
        driver.admit(prompt)
        driver.chunk(row, len(prompt))
        if case["speculation"] == "ngram":
            driver.speculate(row, 2)
    driver.step()
    driver.step()
    if case["swap"] == "swapped":
        blocks = driver.rows[0].blocks
        places = to_column(list(range(len(blocks))))
        driver.plan.swap_out_blocks += to_column(blocks)
        driver.plan.swap_out_host_blocks += places
        driver.plan.copy_ids += to_column([1])
        tokens = driver.leave(0)
        driver.step()
        back = [driver.take_block() for _ in range(-(-len(tokens) // 8))]
        driver.admit(tokens, row=0, blocks=back, computed=len(tokens) - 1)
        driver.plan.swap_in_host_blocks += to_column(list(range(len(back))))
        driver.plan.swap_in_blocks += to_column(back)
        driver.plan.copy_ids += to_column([2])
        driver.chunk(0, 1)
    driver.step()
    driver.step()
    return [(prompt, driver.rows[row].tokens[len(prompt) :]) for row, prompt in enumerate(prompts)]


def make_model(kind: str, num_ranks: int, folder: Path) -> Model:
    """Write the checkpoints for a form of weights."""
    if kind == "gpt-oss":
        found = make_mxfp4(folder, **SIZES)
    elif kind.startswith("experts"):
        layout = "gptq-int4-zeros" if kind.endswith("int4") else "ct-nvfp4"
        found = make_pair(layout, folder, "MixtralForCausalLM", only="experts", **SIZES)
    elif kind.startswith("Q"):
        found = make_gguf(kind, folder, **(SIZES | {"hidden_size": 256, "intermediate_size": 256}))
    elif kind == "blocks in e4m3":
        sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
        found = make_pair("fp8-block-128", folder, **sizes)
    elif kind in ("int8", "int4", "fp8", "fp8 in e4m3"):
        sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256}
        plain = make_checkpoint("LlamaForCausalLM", folder / "plain", **sizes)
        served = make_checkpoint("LlamaForCausalLM", folder / "served", **sizes)
        round_weights(plain, kind.split()[0], num_ranks)
        return Model(served, plain, kind.split()[0])
    else:
        found = make_pair(kind, folder, **SIZES)
    return Model(found.quantised, found.plain)


def round_weights(folder: Path, kind: str, num_ranks: int) -> None:
    """Replace the weights of a checkpoint by those that `--quantization` represents; each rank quantises its part."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if weight.dim() == 2 and "embed_tokens" not in name:
            own = Kind.INT8 if kind == "int8" or "lm_head" in name else Kind.INT4
            own = Kind.FP8 if kind == "fp8" else own
            parts = weight.chunk(num_ranks if name.endswith(("o_proj.weight", "down_proj.weight")) else 1, 1)
            found = [weight_only.quantise_weight(part, own) for part in parts]
            tensors[name] = torch.cat([weight_only.dequantised(each) for each in found if each is not None], 1)
    save_file(tensors, file, {"format": "pt"})


def round_activations(oracle: Oracle, num_ranks: int, *, block: int) -> None:
    """Make the oracle's linear layers round their inputs to e4m3, per token or block; each rank rounds its part."""
    for name, module in oracle.model.named_modules():
        if not isinstance(module, torch.nn.Linear) or (name == "lm_head" and block):
            continue
        parts = num_ranks if name.endswith(("o_proj", "down_proj")) else 1

        def rounded(_: object, inputs: tuple[torch.Tensor], parts: int = parts) -> tuple[torch.Tensor]:
            (x,) = inputs
            size = block or x.shape[-1] // parts
            groups = x.reshape(*x.shape[:-1], -1, size)
            scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / fp8_linear.LARGEST
            return (((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2),)

        module.register_forward_pre_hook(rounded)
