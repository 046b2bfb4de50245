"""Each field of config.json means to a hand-written family what it means to the family's class in `transformers`.

The fields are not listed here; `field_names` finds them. Each field is changed in a checkpoint whose other fields have
effective values, and the logits of both sides are compared. `CHANGES` contains each field's new values. For other
fields, for example those in a new version of `transformers`, values are guessed from the type. If no guess yields a
model, the test fails and requests an entry.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.utils import logging as transformers_logging

from checks.driver import CPU
from shared.config import ConfigError, WorkerConfig
from tests.worker_svc.test_packed import logits_of
from worker_svc.model.families import FAMILIES
from worker_svc.model.loader import load_model

Change = dict[str, Any]
"""Fields in config.json and their new values; `ABSENT` means that the field is omitted."""
ABSENT = object()

CONFIG_CLASSES = (
    transformers.LlamaConfig,
    transformers.MistralConfig,
    transformers.MinistralConfig,
    transformers.Qwen2Config,
    transformers.Qwen3Config,
    transformers.MixtralConfig,
    transformers.Qwen2MoeConfig,
    transformers.Qwen3MoeConfig,
)
BASE: Change = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 8,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
}
"""Fields of every family, also where its class ignores them."""
PROMPTS = [list(range(3, 33)), list(range(40, 20, -2))]
"""Both are longer than the window."""

ROPE: dict[str, Change] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "proportional": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"short_factor": [1.5] * 16, "long_factor": [3.0] * 16, "original_max_position_embeddings": 64},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
"""Parameters of each scaling of positions."""
ROPE_VALUES: dict[str, list[Any]] = {
    "rope_theta": [50.0],
    "partial_rotary_factor": [0.5, 1.0],
    "factor": [3.0],
    "original_max_position_embeddings": [48],
    "attention_factor": [0.7],
    "beta_fast": [16.0],
    "beta_slow": [2.0],
    "short_factor": [[2.0] * 16],
    "long_factor": [[2.0] * 16],
    "low_freq_factor": [2.0],
    "high_freq_factor": [8.0],
    "mscale": [0.5],
    "mscale_all_dim": [0.8],
    "truncate": [False],
    "mrope_section": [[8, 4, 4]],
}
"""What each parameter of a scaling is changed to."""


def to_each(name: str, *values: Any) -> dict[str, list[Change]]:
    """The entry of a field that is changed alone."""
    return {name: [{name: value} for value in values]}


CHANGES: dict[str, list[Change]] = (
    to_each("architectures", ["MistralForCausalLM"], ["LlamaForCausalLM"], "LlamaForCausalLM", [])
    | to_each("model_type", "llama", "mistral", "qwen2", "qwen3", "gemma")
    | to_each("hidden_size", 32)
    | to_each("intermediate_size", 64)
    | {"num_hidden_layers": [{"num_hidden_layers": 3, "layer_types": ABSENT}]}
    | to_each("num_attention_heads", 8)
    | to_each("num_key_value_heads", 1, 4, 3)
    | to_each("head_dim", 16)
    | to_each("hidden_act", "gelu", "relu")
    | to_each("dtype", "bfloat16", "float16")
    | to_each("sliding_window", 4, 64, None)
    | to_each("layer_types", ["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention", "chunked_attention"])
    | {"max_window_layers": [{"max_window_layers": count, "layer_types": ABSENT} for count in (0, 1)]}
    | {"use_sliding_window": [{"use_sliding_window": False, "layer_types": ABSENT}]}
    | to_each("rope_theta", 1000.0)
    | to_each("rope_parameters", *({"rope_type": kind, "rope_theta": 50.0} | ROPE[kind] for kind in ROPE))
    | to_each("rope_scaling", {"type": "linear", "factor": 2.0})
    | to_each("partial_rotary_factor", 0.5)
    | to_each("per_layer_config", {"1": {"intermediate_size": 64}})
    | to_each("quantization_config", {"quant_method": "fp8"})
    | to_each("transformers_weights", "other.safetensors")
    | to_each("text_config", {"hidden_size": 32})
    | to_each("decoder", {"hidden_size": 32})
    | to_each("generator", {"hidden_size": 32})
    | to_each("id2label", {"0": "a", "1": "b", "2": "c"})
    | to_each("label2id", {"a": 0})
    | to_each("problem_type", "regression")
    | to_each("attn_implementation", "sdpa")
    | to_each("num_experts", 6)
    | to_each("num_experts_per_tok", 1, 4)
    | to_each("moe_intermediate_size", 32)
    | to_each("shared_expert_intermediate_size", 48)
    | to_each("mlp_only_layers", [1], [0, 1])
    | to_each("decoder_sparse_step", 2)
    | to_each("auto_map", {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"})
    | to_each("fusion_config", {})
    | to_each("mtp_layer_types", ["full_attention"])
    | to_each("vision_feature_select_strategy", "full")
    | to_each("transformers_version", "4.30.0")
    | to_each("name_or_path", "another")
    | to_each("mlp_layer_types", ["dense", "dense"])
    | to_each("return_dict", True)  # With False, the classes themselves fail.
)
"""What a field is changed to, with others where it needs them to matter."""
REFUSED = frozenset(
    {
        "architectures",  # A class other than that of model_type.
        "is_causal",  # Attention to later tokens.
        "per_layer_config",  # Layers with different sizes.
        "quantization_config",
        "transformers_weights",  # A weight file with another name.
        "text_config",  # A decoder within another model.
        "decoder",
        "generator",
    }
)
"""Fields that may be refused although `transformers` computes something."""


def base_config(model_type: str) -> Change:
    """A config.json of the family."""
    base = BASE | {"model_type": model_type, "architectures": [FAMILIES[model_type].architectures[0]]}
    if model_type == "mistral":
        del base["layer_types"]  # Otherwise `transformers` would treat this Mistral as a Ministral.
    return base


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Return the names of all configuration attributes that are read within the context."""
    names: set[str] = set()
    original = PretrainedConfig.__getattribute__

    def recording(self: PretrainedConfig, name: str) -> Any:
        names.add(name)
        return original(self, name)  # type: ignore[no-untyped-call]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainedConfig, "__getattribute__", recording)
        yield names


def field_names(folder: Path) -> list[str]:
    """Fields that any family declares, and those that either side reads while it loads and computes the model."""
    declared = {field.name for config in CONFIG_CLASSES for field in fields(config)}
    settable = {name for name in dir(PretrainedConfig) if getattr(getattr(PretrainedConfig, name), "fset", None)}
    with recorded_reads() as read:
        their_logits(folder)
        our_logits(folder)
    # Read-only attributes of the base class, such as methods, are not fields.
    free = {name for name in read if not hasattr(PretrainedConfig, name)}
    return sorted(name for name in {*BASE, *declared, *settable, *free} if not name.startswith("_"))


def rope_reads(config: PretrainedConfig) -> set[str]:
    """The parameter names that the function for the configuration's rope type reads."""
    names: set[str] = set()

    class Recording(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            names.add(name)
            return super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            names.add(name)
            return super().get(name, default)

    config.rope_parameters = Recording(config.rope_parameters)
    if (compute := ROPE_INIT_FUNCTIONS.get(config.rope_parameters["rope_type"])) is not None:
        compute(config, CPU)
    return names


def changes_of(name: str, config: PretrainedConfig) -> list[Change]:
    """What the field is changed to."""
    if name in CHANGES:
        return CHANGES[name]
    current = getattr(config, name, None)
    if isinstance(current, bool):
        return [{name: not current}]
    if isinstance(current, int | float):
        return [{name: current + 1}, {name: current + 0.5}]
    return [{name: True}, {name: False}, {name: 3}]


def is_wrong(name: str, outcome: str) -> bool:
    """Whether the promise is broken."""
    if outcome in ("same", "refused by both"):
        return False
    # A guessed value may have no meaning for the class.
    guessed = name not in CHANGES
    return not (outcome.startswith("is refused: ") and name in REFUSED) and not (
        guessed and "transformers fails" in outcome
    )


def write_checkpoint(folder: Path, content: Change) -> None:
    """A checkpoint with this config.json and random weights of the shapes that `transformers` defines."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in content.items() if value is not ABSENT})
    )
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # Only names and shapes are needed.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weights[name] = noise * 0.2 if weight.ndim > 1 or name.endswith("bias") else 1 + noise * 0.1
    save_file(weights, folder / "model.safetensors")


def their_logits(folder: Path) -> torch.Tensor:
    """The logits of all prompt tokens from the `transformers` class, `[tokens, vocab] float64`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rows = [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS]
    return torch.cat(rows).double()


def our_logits(folder: Path) -> torch.Tensor:
    """The same by the worker's model, for sequences below any original length of longrope."""
    model, description = load_model(WorkerConfig(model=str(folder), device="cpu", max_model_len=32), CPU)
    return logits_of(model, PROMPTS, description.dtype)


def compare(folder: Path, content: Change) -> str:
    """How the two sides get on with a config.json: "same" or what is not."""
    try:
        write_checkpoint(folder, content)
        theirs = their_logits(folder)
    except Exception as error:  # A class may raise any error for an unexpected value.
        theirs = None
        their_error = error
    try:
        ours = our_logits(folder)
    except ConfigError as error:
        line = str(error)
        if "\n" in line:
            return f"is refused in several lines: {line}"
        return f"is refused: {line}" if theirs is not None else "refused by both"
    except Exception as error:
        return f"breaks the loading: {error!r}"
    if theirs is None:
        return f"is served, but transformers fails: {their_error!r}"
    distances = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    # Rounding to 16 bits may select another expert for a few tokens.
    short = "16" in str(content["dtype"])
    distance = float(distances.median() if short else distances.max())
    return "same" if distance < (0.05 if short else 1e-4) else f"moves the logits by {distance:.0%}"


@pytest.fixture(autouse=True)
def _quiet_inference() -> Iterator[None]:
    """No gradients, and no lines of `transformers` about values that it does not like."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        yield
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@pytest.mark.every(3)
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[pytest.mark.release] * (family.experts is not None))
        for name, family in FAMILIES.items()
        if family.architectures and not family.needs_triton
    ],
)
def test_a_field_means_what_it_means_to_the_class_of_transformers(model_type: str, tmp_path: Path) -> None:
    """For any change of a field, the logits equal the class's, or the checkpoint is refused in one line."""
    folder, base = tmp_path / "checkpoint", base_config(model_type)
    assert compare(folder, base) == "same"
    config, names = AutoConfig.from_pretrained(folder), field_names(folder)

    results = {
        name: [(change, compare(folder, base | change)) for change in changes_of(name, config)] for name in names
    }

    wrong = [f"{change} {result}" for name in names for change, result in results[name] if is_wrong(name, result)]
    compared = {name for name in names for _, result in results[name] if result == "same"}
    untried = sorted(set(names) - compared - REFUSED)
    assert not wrong
    assert not untried, "no value of these fields gave a model; add one to CHANGES"


@pytest.mark.every(3)
@pytest.mark.parametrize("rope_type", sorted({"default", *ROPE_INIT_FUNCTIONS}))
def test_a_parameter_of_positions_means_what_it_means_to_the_class(rope_type: str, tmp_path: Path) -> None:
    """The same holds for each parameter of each rope type that `transformers` has."""
    assert rope_type in ROPE, "a new rope type; give its parameters in ROPE"
    folder = tmp_path / "checkpoint"
    rope = {"rope_type": rope_type, "rope_theta": 100.0} | ROPE[rope_type]
    base = base_config("llama") | {"rope_parameters": rope}
    assert compare(folder, base) in ("same", "refused by both")
    names = {*RopeParameters.__annotations__, *rope_reads(AutoConfig.from_pretrained(folder))} - {"rope_type", "type"}
    assert names <= ROPE_VALUES.keys(), "new parameters; give their values in ROPE_VALUES"

    results = {
        f"{name}={value}": compare(folder, base | {"rope_parameters": rope | {name: value}})
        for name in names
        for value in ROPE_VALUES[name]
    }

    assert not {change: result for change, result in results.items() if result not in ("same", "refused by both")}
