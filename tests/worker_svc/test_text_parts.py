"""Models for several media: their text part gives the tokens of the whole class of `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from checks.driver import Driver, make_engine
from measure.testbed.checkpoints import SLIDING_WINDOW, VOCAB_SIZE, draw_weights, make_checkpoint
from shared.config import ConfigError
from tests.worker_svc.oracle import Oracle, Verdict

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
}  # fmt: skip
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64,
}  # fmt: skip
_GEMMA_4: dict[str, Any] = _TEXT | {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": SLIDING_WINDOW,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        _TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": SLIDING_WINDOW},
        _PIXTRAL,
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        _TEXT | {"rope_parameters": _MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
    ),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLConfig", _TEXT | {"rope_parameters": _MROPE}, _QWEN),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        _TEXT | {"head_dim": 16, "rope_parameters": _MROPE},
        _QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        _TEXT
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "Gemma4ForConditionalGeneration": ("Gemma4Config", _GEMMA_4 | {"hidden_size_per_layer_input": 8}, _SIGLIP),
    "Gemma4UnifiedForConditionalGeneration": (
        "Gemma4UnifiedConfig",
        _GEMMA_4,
        {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 64},
    ),
}
_AUDIO: dict[str, dict[str, Any]] = {
    "Gemma4ForConditionalGeneration": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4],
        "output_proj_dims": 32,
    },
    "Gemma4UnifiedForConditionalGeneration": {"audio_embed_dim": 32},
}  # fmt: skip


def write(architecture: str, folder: Path, *, tie: bool, seed: int = 0) -> PreTrainedModel:
    """Write a tiny random checkpoint in the layout of the hub, and return its model."""
    config_class, text, vision = MODELS[architecture]
    whole = getattr(transformers, config_class)
    audio = {"audio_config": _AUDIO[architecture]} if architecture in _AUDIO else {}
    config: PretrainedConfig = whole(text_config=text, vision_config=vision, tie_word_embeddings=tie, **audio)
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, architecture)(config).eval()
    draw_weights(model, 0.2, seed)
    model.save_pretrained(folder)
    return model


@pytest.mark.every(3)
@pytest.mark.parametrize("architecture", MODELS)
def test_greedy_tokens_are_those_of_the_whole_class(architecture: str, tmp_path: Path) -> None:
    """Short and long prompts, with tied and untied embeddings, in the layouts of the hub and of `transformers` 5."""
    for tie in (False, True):
        folder = tmp_path / f"tied_{tie}"
        model = write(architecture, folder, tie=tie)
        verdict, oracle = Verdict(), Oracle(model)
        for layout in ("hub", "classes"):
            if layout == "classes":
                names = {name for name in model.state_dict() if not (tie and name == "lm_head.weight")}
                save_file(
                    {name: tensor.clone() for name, tensor in model.state_dict().items() if name in names},
                    folder / "model.safetensors",
                )
            driver = Driver(make_engine(folder))
            for length in (3, 3 * SLIDING_WINDOW):
                prompt = driver.rng.integers(3, VOCAB_SIZE, length).tolist()
                oracle.judge(prompt, driver.generate(prompt, 12), verdict)
        assert verdict.near_ties == 0


def test_gemma_3n_is_served_without_its_image_and_audio_encoders(tmp_path: Path) -> None:
    """A checkpoint with the names of the hub gives the tokens of the text class; its image encoder needs a library."""
    text = make_checkpoint("Gemma3nForCausalLM", tmp_path / "text", tie_word_embeddings=True)
    folder = tmp_path / "whole"
    whole = transformers.Gemma3nConfig(text_config=json.loads((text / "config.json").read_text()))
    written = whole.to_dict() | {"architectures": ["Gemma3nForConditionalGeneration"]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written))
    tensors = load_file(text / "model.safetensors")
    others = ("vision_tower.timm_model.conv_stem.conv.weight", "audio_tower.conformer.0.norm.weight")
    save_file(
        {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
        | {f"model.{name}": torch.zeros(4) for name in (*others, "embed_vision.embedding.weight")},
        folder / "model.safetensors",
    )
    verdict, oracle, driver = Verdict(), Oracle(text), Driver(make_engine(folder))
    for length in (3, 3 * SLIDING_WINDOW):
        prompt = driver.rng.integers(3, VOCAB_SIZE, length).tolist()
        oracle.judge(prompt, driver.generate(prompt, 12), verdict)
    assert verdict.near_ties == 0


def test_tensors_of_other_media_may_be_missing_but_not_those_of_the_text(tmp_path: Path) -> None:
    """A checkpoint without its vision tower is served; without a layer of the text it is refused by name."""
    write("Qwen2_5_VLForConditionalGeneration", tmp_path, tie=False)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    assert len(kept) < len(tensors)

    save_file(kept, tmp_path / "model.safetensors")
    assert len(Driver(make_engine(tmp_path)).generate([5, 6, 7], 4)) == 4

    del kept[next(name for name in kept if name.endswith("layers.1.mlp.up_proj.weight"))]
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        make_engine(tmp_path)
