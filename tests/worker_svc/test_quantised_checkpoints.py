"""A quantised checkpoint gives the logits of the same checkpoint with dequantised weights."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from kernels.linear import PackedLinear, dequantised
from kernels.native.library import native_levels
from kernels.native.serving import native
from measure.testbed.checkpoints import VOCAB_SIZE, edit_config, make_checkpoint
from measure.testbed.quantised_checkpoints import LAYOUTS, make_gguf, make_mxfp4, make_pair, rounds_activations
from shared.config import ConfigError
from tests.cpu_kernels import cpu_kernels
from tests.worker_svc.test_packed import load, logits_of
from worker_svc.model.quantised import Fp4Weight, QuantisedWeight, StoredWeights
from worker_svc.model.weights import read_tensors

TOKENS = [list(range(5, 45)), [7], list(range(60, 63))]
AS_STORED = (
    *("ct-int8-channel", "ct-int8-tensor", "ct-int8-packed", "ct-int4", "ct-int4-zeros", "ct-int4-fp16"),
    *("gptq-int4", "gptq-int4-zeros", "gptq-int8", "awq"),
)
"""Layouts that the CPU kernels hold exactly."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance of logits."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dequantised_weights_are_those_of_the_layout(layout: str, tmp_path: Path) -> None:
    """Every weight equals that of an independent reader or writer of the layout, up to one rounding of float32."""
    pair = make_pair(layout, tmp_path)
    plain = load_file(pair.plain / "model.safetensors")
    found = {
        name: tensor if isinstance(tensor, torch.Tensor) else tensor.dequantised()
        for name, tensor in read_tensors(pair.quantised)
        if not name.endswith(".bias")
    }

    assert found.keys() == plain.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(found[name], expected, rtol=3e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("layout", ["ct-nvfp4", "ct-mxfp4"])
def test_weights_in_e2m1_are_those_that_the_library_decompresses(layout: str, tmp_path: Path) -> None:
    """compressed-tensors decompresses them into bfloat16, which has all values of MXFP4."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder = make_pair(layout, tmp_path).quantised
    name = "model.layers.0.mlp.down_proj"
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(raw).config_groups["group_0"]
    stored = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in load_file(folder / "model.safetensors").items()
        if key.startswith(f"{name}.")
    }
    expected = BaseCompressor.get_value_from_registry(raw["format"]).decompress(stored, scheme)["weight"]
    ((_, found),) = read_tensors(folder, only=(f"{name}.weight",))
    assert isinstance(found, Fp4Weight)

    torch.testing.assert_close(found.dequantised(), expected.float(), rtol=0 if layout == "ct-mxfp4" else 8e-3, atol=0)


def test_experts_in_mxfp4_are_those_that_transformers_reads(tmp_path: Path) -> None:
    """gpt-oss stores blocks and scales of all experts; a CPU serves the dequantised weights."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    pair = make_mxfp4(tmp_path)
    plain, stored = (load_file(folder / "model.safetensors") for folder in (pair.plain, pair.quantised))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    converted = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
    found = {
        key: tensor if isinstance(tensor, torch.Tensor) else tensor.dequantised()
        for key, tensor in read_tensors(pair.quantised)
    }

    assert torch.equal(found[name], converted)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[key], plain[key]) for key in plain)
    expected, logits = (
        logits_of(load(folder, dtype="float32"), TOKENS, torch.float32) for folder in (pair.plain, pair.quantised)
    )
    assert distance(logits, expected) < 1e-6


def test_older_checkpoints_of_modelopt_describe_their_weights_in_a_file(tmp_path: Path) -> None:
    """`hf_quant_config.json` stands for the field of config.json."""
    pair = make_pair("modelopt-nvfp4", tmp_path)
    edit_config(pair.quantised, lambda values: values.pop("quantization_config"))
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (pair.quantised / "hf_quant_config.json").write_text(json.dumps(content))
    expected, logits = (
        logits_of(load(folder, dtype="float32"), TOKENS, torch.float32) for folder in (pair.plain, pair.quantised)
    )

    assert distance(logits, expected) < 1e-6


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("layout", ["ct-int4", "ct-int8-channel", "gptq-int4-order", "awq", "fp8-block", "ct-nvfp4"])
def test_a_quantised_checkpoint_computes_what_its_dequantised_weights_do(
    layout: str, architecture: str, tmp_path: Path
) -> None:
    """Quire's own code and decoders of transformers read each layout; torch computes with dequantised weights."""
    pair = make_pair(layout, tmp_path, architecture)
    with cpu_kernels("off"):
        expected, found = (
            logits_of(load(folder, dtype="float32"), TOKENS, torch.float32) for folder in (pair.plain, pair.quantised)
        )

    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_of_a_weight_is_that_part_of_its_values(layout: str, tmp_path: Path) -> None:
    """Ranks get parts of the codes and scales; a part that begins inside a block is dequantised instead."""
    name = "model.layers.0.mlp.down_proj.weight"
    ((_, weight),) = read_tensors(make_pair(layout, tmp_path).quantised, only=(name,))
    assert isinstance(weight, QuantisedWeight | Fp4Weight)
    whole = weight.dequantised()
    block = weight.block if isinstance(weight, QuantisedWeight) else (1, weight.group)

    for dim in (0, 1):
        size = whole.shape[dim]
        for begin, length in ((0, size // 2), (size // 2, size // 2), (16, 48)):
            part = weight.narrow(dim, begin, length)
            if part is None:
                assert begin % block[dim] or length % block[dim]
            else:
                assert torch.equal(part.dequantised(), whole.narrow(dim, begin, length))


@pytest.mark.skipif(native() is None, reason="needs the native CPU kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernels_hold_codes_and_scales_exactly_or_dequantised_weights(layout: str, tmp_path: Path) -> None:
    """A packed matrix of several layers has their codes and scales unchanged; other layouts fill the matrix."""
    pair = make_pair(layout, tmp_path)
    plain = load_file(pair.plain / "model.safetensors")
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    expected = torch.cat([plain[name] for name in names])
    matrix = torch.zeros_like(expected)
    stored, row = StoredWeights(), 0
    for _, tensor in sorted(read_tensors(pair.quantised, only=names), key=lambda item: names.index(item[0])):
        assert not isinstance(tensor, torch.Tensor)
        stored.put("weight", matrix[row : row + tensor.shape[0]], tensor)
        row += tensor.shape[0]

    packed = stored.pack(matrix, None)

    assert (packed is not None) == (layout in AS_STORED)
    held = matrix if packed is None else _weights_of(packed)
    torch.testing.assert_close(held, expected, rtol=3e-7, atol=1e-9)


@contextmanager
def filled_memory() -> Iterator[None]:
    """Context in which torch fills new tensors with NaN, so that a result shows memory that nothing was written to."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.drawn(30)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("level", ["auto", "off"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_matrix_of_a_checkpoint_may_be_quantised(layout: str, level: str, tied: bool, tmp_path: Path) -> None:
    """Embedding, LM head and layers: logits are those of the dequantised model, and no weight is left unwritten.

    Products over weights as stored round their activations to eight bits, which moves logits by a few hundredths.
    """
    pair = make_pair(layout, tmp_path, only="", tie_word_embeddings=tied)
    with cpu_kernels("off"):
        expected = logits_of(load(pair.plain, dtype="float32"), TOKENS, torch.float32)
    with cpu_kernels(level), filled_memory():
        found = logits_of(load(pair.quantised, dtype="float32"), TOKENS, torch.float32)

    assert distance(found, expected) < (0.1 if level == "auto" and layout in AS_STORED else 1e-5)


@pytest.mark.parametrize("only", ["embed_tokens", "lm_head", "mlp.gate", "experts", "shared_expert_gate"])
def test_any_matrix_of_a_mixture_may_be_quantised(only: str, tmp_path: Path) -> None:
    """Routers and gates included: a matrix that is quantised alone leaves no other one unwritten."""
    pair = make_pair("fp8-tensor", tmp_path, "Qwen2MoeForCausalLM", only=only)
    with cpu_kernels("off"):
        expected = logits_of(load(pair.plain, dtype="float32"), TOKENS, torch.float32)
    with filled_memory():
        found = logits_of(load(pair.quantised, dtype="float32"), TOKENS, torch.float32)

    assert distance(found, expected) < 1e-5


def test_a_quantised_weight_that_nothing_packs_is_refused() -> None:
    """A model does not compute with a matrix whose weights still wait: the error names a tensor."""
    stored, matrix = StoredWeights(), torch.zeros(2, 4)
    weight = QuantisedWeight(torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1), None, (1, 4))
    stored.put("model.other.weight", matrix, weight)

    with pytest.raises(ConfigError, match=r"^model: model\.other\.weight is quantised .*; use a checkpoint"):
        stored.check_empty()
    stored.fill(matrix)
    stored.check_empty()
    assert bool((matrix == 1).all())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_codes_without_scales_are_refused(architecture: str, tmp_path: Path) -> None:
    """Integers that config.json does not describe as quantised weights are not served as if they were weights."""
    pair = make_pair("ct-int8-channel", tmp_path, architecture)
    file = pair.quantised / "model.safetensors"
    edit_config(pair.quantised, lambda values: values.pop("quantization_config"))
    with pytest.raises(ConfigError, match=r"^model: .*_proj\.weight.*; use a checkpoint that matches config\.json"):
        load(pair.quantised)

    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("weight_scale")}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"^model: .*_proj\.weight has the type (int8|I8), .*; use a checkpoint"):
        load(pair.quantised)


def _weights_of(packed: PackedLinear) -> torch.Tensor:
    """The weights that packed int8 or int4 weights stand for."""
    if packed.structure.scales is None:
        return dequantised(packed)
    codes, scales, _ = packed.tensors
    rows = codes.transpose(1, 2).reshape(len(scales), -1)[: packed.outputs, : packed.inputs]
    return rows.float() * scales[: packed.outputs, None]


@pytest.mark.parametrize("level", [kernels.level_name for kernels in native_levels()])
@pytest.mark.parametrize("layout", ["ct-int8-channel", "ct-int4-zeros", "awq"])
def test_the_kernels_compute_with_weights_as_stored(layout: str, level: str, tmp_path: Path) -> None:
    """At every level, logits are those of the dequantised weights with activations rounded to eight bits.

    An activation that lies between two codes may be rounded either way, which moves the logits of its token.
    """
    pair = make_pair(layout, tmp_path)
    oracle = rounds_activations(AutoModelForCausalLM.from_pretrained(pair.plain, dtype=torch.float32))
    rows = [[token] for token in range(5, 65)]
    expected = oracle(torch.tensor(rows)).logits[:, 0]
    with cpu_kernels(level), capture_logs() as logs:
        found = logits_of(load(pair.quantised, dtype="float32"), rows, torch.float32)
    distances = (found - expected).norm(dim=1) / expected.norm(dim=1)

    assert [(log["as_stored"], log["dequantised"]) for log in logs if "as_stored" in log] == [(14, 0)]
    assert float((distances < 1e-5).double().mean()) > 0.8
    assert float(distances.max()) < 0.05


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("Q8_0", "LlamaForCausalLM"),
        ("Q4_K", "LlamaForCausalLM"),
        ("Q6_K", "Qwen2ForCausalLM"),
        ("F16", "Qwen3ForCausalLM"),
        ("BF16", "MistralForCausalLM"),
    ],
)
def test_a_gguf_file_computes_what_its_dequantised_weights_do(kind: str, architecture: str, tmp_path: Path) -> None:
    """Tensor names, the row order for rotary embeddings, and every block type match what `gguf` writes."""
    pair = make_gguf(kind, tmp_path, architecture)
    with cpu_kernels("off"):
        expected, found = (
            logits_of(load(folder, dtype="float32"), TOKENS, torch.float32) for folder in (pair.plain, pair.quantised)
        )

    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize("level", [kernels.level_name for kernels in native_levels()])
@pytest.mark.parametrize(
    ("kind", "architecture", "as_stored"),
    [
        ("Q4_0", "LlamaForCausalLM", 16),
        ("Q8_0", "Qwen2ForCausalLM", 16),
        ("Q4_K_M", "MistralForCausalLM", 16),
        ("Q5_K", "LlamaForCausalLM", 16),
        ("Q4_1", "LlamaForCausalLM", 0),
    ],
)
def test_the_kernels_compute_with_a_gguf_file_as_it_is(
    kind: str, architecture: str, as_stored: int, level: str, tmp_path: Path
) -> None:
    """At every level, logits are those of the dequantised weights with activations rounded to eight bits.

    All matrices are packed, the embedding and the LM head too. Types without a layout are dequantised.
    """
    pair = make_gguf(kind, tmp_path, architecture)
    oracle = AutoModelForCausalLM.from_pretrained(pair.plain, dtype=torch.float32)
    if as_stored:
        rounds_activations(oracle, head=True)
    rows = [[token] for token in range(5, 65)]
    expected = oracle(torch.tensor(rows)).logits[:, 0]
    with cpu_kernels(level), capture_logs() as logs:
        found = logits_of(load(pair.quantised, dtype="float32"), rows, torch.float32)
    distances = (found - expected).norm(dim=1) / expected.norm(dim=1)

    assert [log["as_stored"] for log in logs if "as_stored" in log] == [as_stored] * bool(as_stored)
    assert float((distances < 1e-5).double().mean()) > 0.8
    assert float(distances.max()) < 0.05


@pytest.mark.skipif(native() is None, reason="needs the native CPU kernels")
def test_a_quantised_checkpoint_can_be_quantised_again(tmp_path: Path) -> None:
    """`--quantization` applies to the dequantised weights, for example of FP8 and GGUF, as to any others."""
    pair = make_pair("fp8-block", tmp_path)
    expected, found = (
        logits_of(load(folder, dtype="float32", quantization="int8"), TOKENS, torch.float32)
        for folder in (pair.plain, pair.quantised)
    )

    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "method bitsandbytes .*is not supported; use"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ with 3 bits, which is not supported; use"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "the GPTQ format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "the AWQ version gemv"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 in e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "not valid for fp8: .*; correct"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "a block of 0 x 128 weights is not possible; correct"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"group_0": {"targets": ["re:("], "weights": {"num_bits": 8}}},
            },
            "not valid for compressed-tensors: missing \\), .*; correct",
        ),
        ({"quant_method": "fp8"}, "the checkpoint has no quantised weight; remove the field"),
        ({"quant_method": "gptq"}, "not valid for gptq: the field bits is missing; correct"),
        ({"quant_method": "compressed-tensors"}, "not valid for compressed-tensors: config_groups: .*; correct"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
            "not valid",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mxfp8-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
            },
            "the format mxfp8-quantized with 8 bits",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "the ModelOpt algorithm W4A8_AWQ"),
    ],
)
def test_unknown_methods_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """One line names the method or the option, and what to use instead."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    edit_config(folder, lambda values: values.update(quantization_config=config))

    with pytest.raises(ConfigError, match=f"^model: .*{message}") as refused:
        load(folder)
    assert "\n" not in str(refused.value)


def test_tensors_that_do_not_match_the_config_are_refused(tmp_path: Path) -> None:
    """A missing tensor, scales of another group size, and an unknown layout name the layer."""
    pair = make_pair("awq", tmp_path)
    tensors = load_file(pair.quantised / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"

    save_file(
        {key: value for key, value in tensors.items() if key != f"{name}.qzeros"}, pair.quantised / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=rf"lacks {name}\.qzeros, .*; use a complete checkpoint"):
        load(pair.quantised)

    save_file(tensors, pair.quantised / "model.safetensors")
    edit_config(pair.quantised, lambda values: values["quantization_config"].update(group_size=64))
    with pytest.raises(ConfigError, match=r"model\.layers\.\d.*does not match quantization_config"):
        load(pair.quantised)


def first_set(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Return a tensor with another first element."""
    changed = tensor.float().clone()
    changed.view(-1)[0] = value
    return changed.to(tensor.dtype)


DAMAGES: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = [
    (
        "ct-fp8-channel",
        "weight_scale",
        lambda _: None,
        "weight_scale or weight_scale_inv, which its quantised weight needs; use a complete",
    ),
    (
        "fp8-block",
        "weight_scale_inv",
        lambda _: None,
        "weight_scale or weight_scale_inv, which its quantised weight needs; use a complete",
    ),
    (
        "modelopt-nvfp4",
        "weight_scale",
        lambda _: None,
        "weight_scale or weight_scale_inv, which its quantised weight needs; use a complete",
    ),
    ("ct-fp8-tensor", "weight_scale", lambda x: first_set(x, torch.nan), "a scale is not a finite number; use"),
    ("ct-int4", "weight_scale", lambda x: first_set(x, torch.inf), "a scale is not a finite number; use"),
    ("ct-nvfp4", "weight_scale", lambda x: first_set(x, torch.nan), "a scale is not a finite number; use"),
    ("ct-mxfp4", "weight_scale", lambda x: first_set(x, 255), "a scale is not a finite number; use"),
    ("ct-nvfp4", "weight_global_scale", torch.zeros_like, "its global scale is 0; use"),
    ("ct-nvfp4", "weight_global_scale", lambda _: None, "weight_scale_2 or weight_global_scale, which its quantised"),
    ("ct-nvfp4", "weight_global_scale", torch.Tensor.int, "which is not a floating-point type; use"),
    ("ct-nvfp4", "weight_scale", lambda x: x.view(torch.uint8), "scales in e8m0 for groups of 16, not 32; use"),
    ("fp8-block", "weight_scale_inv", lambda x: x[:1], "do not match a weight .* in blocks .*; use"),
    ("modelopt-nvfp4", "weight_scale_2", lambda x: first_set(x, torch.nan), "a scale is not a finite number; use"),
    ("ct-int8-channel", "weight_scale", lambda x: x.new_zeros(0), r"scales \(0, 1\) are not matrices; use"),
    ("ct-int8-channel", "weight_scale", lambda x: x.t().contiguous(), "with a scale per output or tensor; use"),
    ("ct-int8-channel", "weight_scale", lambda x: x[:4].contiguous(), "with a scale per output or tensor; use"),
    ("ct-int8-channel", "weight_scale", torch.Tensor.int, "which is not a floating-point type; use"),
    ("ct-int8-packed", "weight_packed", lambda x: x.flatten(), "does not match quantization_config .*; use"),
    ("ct-int4", "weight_packed", lambda x: x.flatten(), "does not match quantization_config .*; use"),
    ("ct-int4", "weight_shape", lambda x: x[:1], "does not match quantization_config .*; use"),
    ("ct-int4", "weight_packed", lambda x: x[:, 1:].contiguous(), "does not match quantization_config .*; use"),
    ("gptq-int4-order", "g_idx", lambda x: first_set(x, -1), "the groups of the 128 inputs must be from 0 to 3; use"),
    ("gptq-int4-order", "g_idx", lambda _: None, "g_idx, which its quantised weight needs; use"),
    ("ct-int4-zeros", "weight_zero_point", lambda _: None, "weight_zero_point, which its quantised weight needs"),
    ("gptq-int4", "qzeros", lambda x: x[:, 1:].contiguous(), "zero points .* do not match scales .*; use"),
    ("awq", "qweight", torch.Tensor.long, "packed codes have the type torch.int64, not int32; use"),
]
"""Layout, part of a layer, change of this part (None: it is missing), and the line that refuses the checkpoint."""


@pytest.mark.parametrize(
    ("layout", "part", "change", "message"), DAMAGES, ids=[f"{each[0]}-{each[1]}-{n}" for n, each in enumerate(DAMAGES)]
)
def test_damaged_layers_are_refused(
    layout: str, part: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    """A missing part, wrong shapes and types, and scales that are not finite are one line, which names the layer."""
    folder = make_pair(layout, tmp_path, num_hidden_layers=1).quantised
    file, name = folder / "model.safetensors", f"model.layers.0.self_attn.q_proj.{part}"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, file, {"format": "pt"})

    with pytest.raises(ConfigError, match=f"^model: .*q_proj.*{message}") as refused:
        load(folder)
    assert "\n" not in str(refused.value)


def test_gguf_files_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    """Several files, a damaged one, and one without config.json are refused by what is wrong and what to do."""
    folder = make_gguf("Q8_0", tmp_path).quantised
    file = folder / "model.gguf"
    content = file.read_bytes()

    (folder / "second.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match="has 2 GGUF files; remove all except the one to serve"):
        load(folder)
    (folder / "second.gguf").unlink()
    for damaged in (b"GGML" + content[4:], content[: len(content) // 2], content[:40], b""):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"model\.gguf is damaged or incomplete; download the file again$"):
            load(folder)
    file.write_bytes(content)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json; .*"):
        load(folder)


def test_the_config_of_a_quantised_checkpoint_is_part_of_its_fingerprint(tmp_path: Path) -> None:
    """Workers with different weights do not share KV: a GGUF file is sampled as safetensors are."""
    from worker_svc.model.fingerprint import fingerprint

    folder = make_gguf("Q8_0", tmp_path).quantised
    before = fingerprint(folder, torch.float32, with_weights=True)
    content = bytearray((folder / "model.gguf").read_bytes())
    content[-1] ^= 1
    (folder / "model.gguf").write_bytes(bytes(content))

    assert fingerprint(folder, torch.float32, with_weights=True) != before
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCAB_SIZE
