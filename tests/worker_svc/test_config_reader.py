"""`config_reader` reads the same values from a config.json as `transformers`, and declines everything else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checks.driver import CPU
from measure.testbed.checkpoints import make_checkpoint
from shared.config import ConfigError
from tests.worker_svc.test_config_fields import ABSENT, CHANGES, ROPE, ROPE_VALUES, base_config
from worker_svc.model.config import read_config
from worker_svc.model.config_reader import decoder_config_of, read_own
from worker_svc.model.decoder_config import DecoderConfig
from worker_svc.model.families import ARCHITECTURES, FAMILIES
from worker_svc.model.rope import ROPE_TYPES, rope_tables

TYPES = [name for name, family in FAMILIES.items() if family.architectures and not family.needs_triton]
HUB: dict[str, dict[str, Any]] = {
    "llama of 2023": {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True, "vocab_size": 32000,
    },
    "llama with scaled positions": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0", "use_cache": True,
        "vocab_size": 32768,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen2 with 128 k by yarn": {
        "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 151645, "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rope_theta": 1000000.0, "vocab_size": 152064, "use_mrope": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
"""Files in the form in which published models have them."""


def readings(folder: Path, content: dict[str, Any]) -> tuple[DecoderConfig | None, DecoderConfig | None]:
    """The results of the reader and of `transformers` for a config.json; None if one declines or refuses it."""
    (folder / "config.json").write_text(json.dumps(content))
    ours = read_own(folder)
    try:
        config = read_config(folder)
        # Own code declines layers of different sizes.
        theirs = None if getattr(config, "is_heterogeneous", False) else DecoderConfig.of(config)
    except (ConfigError, TypeError):  # TypeError means that a field required by every family is missing.
        theirs = None
    return ours, theirs


@pytest.mark.parametrize("name", HUB)
def test_a_published_config_is_read_without_transformers(name: str, tmp_path: Path) -> None:
    """Published models' files from every family are read, with the same values as in `transformers`."""
    ours, theirs = readings(tmp_path, HUB[name])

    assert ours is not None
    assert ours == theirs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_config_that_transformers_writes_is_read_without_it(architecture: str, tmp_path: Path) -> None:
    """Files saved by the installed version of `transformers` are read, whatever fields it adds."""
    make_checkpoint(architecture, tmp_path)

    ours = read_own(tmp_path)

    assert ours is not None
    assert ours == DecoderConfig.of(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("model_type", TYPES)
def test_a_missing_field_has_the_default_of_the_class(model_type: str, tmp_path: Path) -> None:
    """Each field may be missing, or all at once; then the values are the class's defaults."""
    base = base_config(model_type)
    kept = {name: base[name] for name in ("model_type", "architectures")}
    files = [kept, *({other: value for other, value in base.items() if other != name} for name in base.keys() - kept)]

    for content in files:
        if "num_hidden_layers" not in content:
            content.pop("layer_types", None)
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert decoder_config_of(content) == DecoderConfig.of(read_config(tmp_path)), content


@pytest.mark.parametrize("model_type", TYPES)
def test_a_changed_field_is_read_as_by_the_class_or_left_to_it(model_type: str, tmp_path: Path) -> None:
    """For each change in `test_config_fields`, of fields and of positions, the reader agrees or declines."""
    base = base_config(model_type)
    ropes = [{"rope_type": kind, "rope_theta": 50.0} | ROPE[kind] for kind in ROPE]
    changed_ropes = [rope | {name: value} for rope in ropes for name in ROPE_VALUES for value in ROPE_VALUES[name]]
    changes = [change for each in CHANGES.values() for change in each]
    changes += [{"rope_parameters": rope} for rope in changed_ropes]
    num_read = 0

    for change in changes:
        content = {name: value for name, value in (base | change).items() if value is not ABSENT}
        ours, theirs = readings(tmp_path, content)
        assert ours is None or ours == theirs, change
        num_read += ours is not None

    assert num_read > len(changes) / 3


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.floats(-1, 8),
    st.sampled_from(["silu", "gelu", "float32", "bfloat16", "yarn", "", "full_attention", "llama", "mistral", "qwen3"]),
    st.lists(st.sampled_from([0, 1, 2, "full_attention", "sliding_attention"]), max_size=3),
    st.dictionaries(
        st.sampled_from([*ROPE_VALUES, "rope_type", "type", "full_attention"]),
        st.one_of(st.none(), st.integers(0, 64), st.floats(0, 8), st.sampled_from([*ROPE_TYPES, "mrope"])),
        max_size=4,
    ),
)
_NAMES = [*base_config("qwen3_moe"), *CHANGES, "num_local_experts", "rope_scaling", "torch_dtype", "use_cache"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    model_type=st.sampled_from(TYPES),
    changes=st.dictionaries(st.sampled_from(sorted({*_NAMES})), _VALUES, min_size=1, max_size=2),
    missing=st.sets(st.sampled_from(sorted(base_config("llama"))), max_size=3),
)
def test_any_change_is_read_as_by_the_class_or_left_to_it(
    model_type: str, changes: dict[str, Any], missing: set[str], tmp_path: Path
) -> None:
    """For any field values, even of wrong types, what the reader does not decline equals the class's values."""
    base = {name: value for name, value in base_config(model_type).items() if name not in missing}
    (tmp_path / "config.json").write_text(json.dumps(base | changes))
    try:
        ours = read_own(tmp_path)
    except ConfigError:
        ours = None  # an unsupported quantisation

    assert ours is None or ours == DecoderConfig.of(read_config(tmp_path))


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_positions_are_rotated_bit_by_bit_as_in_transformers(rope_type: str, tmp_path: Path) -> None:
    """For each scaling type, with each parameter changed, the tables have the frequencies of `transformers`."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0} | ROPE[rope_type]
    more: list[dict[str, Any]] = [{}, {"mscale": 0.7, "mscale_all_dim": 1.2}, {"beta_fast": 0.4, "beta_slow": 0.4}]
    more += [{name: value} for name, values in ROPE_VALUES.items() for value in values]
    num_compared = 0

    for change in more:
        content = base_config("llama") | {"rope_parameters": rope | change}
        ours, _ = readings(tmp_path, content)
        if ours is None:
            continue
        cos, sin = rope_tables(ours, 32, 64, CPU)
        if rope_type == "default":
            frequencies = 1.0 / (ours.rope_parameters["rope_theta"] ** (torch.arange(0, 32, 2).float() / 32))
            scaling = 1.0
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](read_config(tmp_path), CPU)
        angles = torch.outer(torch.arange(64).float(), frequencies)
        assert torch.equal(cos, angles.cos() * scaling), change
        assert torch.equal(sin, angles.sin() * scaling), change
        num_compared += 1

    assert num_compared > 5
