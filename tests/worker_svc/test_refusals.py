"""What cannot be served is refused at load, in one line that names what is wrong and what would work."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from checks.driver import CPU, make_engine
from measure.testbed.checkpoints import edit_config, make_checkpoint
from shared.config import ConfigError, WorkerConfig
from worker_svc.device.choice import choose_device
from worker_svc.model.loader import describe_model, load_model

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def write_config(folder: Path, architecture: str, config_class: str, **sizes: Any) -> Path:
    """A folder with config.json only."""
    config = getattr(transformers, config_class)(**sizes)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def refusal(folder: Path, **settings: Any) -> str:
    """The line with which `folder` is refused."""
    with pytest.raises(ConfigError) as raised:
        load_model(WorkerConfig(model=str(folder), **settings), CPU)
    line = str(raised.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("architecture", "config_class", "sizes", "why"),
    [
        ("RwkvForCausalLM", "RwkvConfig", {"vocab_size": 64, "hidden_size": 32}, "outside of a cache"),
        (
            "RecurrentGemmaForCausalLM",
            "RecurrentGemmaConfig",
            SMALL | {"lru_width": 32, "block_types": ["recurrent", "attention"], "max_position_embeddings": 64},
            "differ from its own",
        ),
        ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", {"vocab_size": 64, "n_embd": 32, "n_head": 2}, "no KV cache"),
        ("BertForMaskedLM", "BertConfig", SMALL, "the decoder of model_type bert is"),
        ("BertLMHeadModel", "BertConfig", SMALL, "not causal"),
        ("RobertaForCausalLM", "RobertaConfig", SMALL | {"is_decoder": True}, "differ from its own"),
    ],
)
def test_an_unfit_architecture_is_named(
    architecture: str, config_class: str, sizes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """The line names the class, the reason, and architectures that work."""
    folder = write_config(tmp_path, architecture, config_class, **sizes)

    line = refusal(folder, load_format="random")

    assert line.startswith(f"model: {architecture} is not supported: ")
    assert why in line
    assert "LlamaForCausalLM" in line


def test_a_class_with_a_cache_of_its_own_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """MiniMax-Text-01 has hundreds of gigabytes."""
    folder = write_config(tmp_path, "MiniMaxForCausalLM", "MiniMaxConfig", **SMALL, num_key_value_heads=2)

    with pytest.raises(ConfigError, match=r"MiniMaxForCausalLM is not supported: .* needs a cache of its own; use"):
        describe_model(WorkerConfig(model=str(folder), load_format="random"), CPU)


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    """The path of a weight file is not taken for a hub id, whether the file exists or not."""
    file = tmp_path / "tiny.Q4_0.gguf"
    file.touch()

    assert "is a file; specify its folder" in refusal(file)
    for missing in ("models/none.gguf", str(tmp_path / "none.safetensors")):
        assert f"model: file {missing} does not exist; use a checkpoint folder" in refusal(Path(missing))


def test_layers_with_a_past_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    """A class that declares support, but has layers whose cache is of another kind, is refused by its layer types."""
    folder = write_config(tmp_path, "Lfm2ForCausalLM", "Lfm2Config", **SMALL, num_key_value_heads=2)
    edit_config(folder, lambda config: config.update(layer_types=["compressed_sparse_attention", "full_attention"]))

    assert "a past of an unknown kind (compressed_sparse_attention)" in refusal(folder, load_format="random")


def test_a_model_without_a_number_of_positions_needs_max_model_len(tmp_path: Path) -> None:
    """Bloom has no positions in its weights, and its config.json may have no limit: the setting is the limit."""
    folder = write_config(tmp_path, "BloomForCausalLM", "BloomConfig", vocab_size=64, hidden_size=32)

    assert "set max_model_len" in refusal(folder, load_format="random")
    config = WorkerConfig(model=str(folder), load_format="random", max_model_len=96)
    assert load_model(config, CPU)[1].max_model_len == 96


def test_a_damaged_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    """No config, no weights, a missing tensor, a wrong shape, an unknown tensor: each has a line of its own."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refusal(empty)

    folder = make_checkpoint("LlamaForCausalLM", tmp_path / "llama")
    edit_config(folder, lambda config: config.update(num_hidden_layers=3))
    assert "lacks model.layers.2" in refusal(folder)
    edit_config(folder, lambda config: config.update(num_hidden_layers=1))
    assert "has a tensor model.layers.1" in refusal(folder)
    edit_config(folder, lambda config: config.update(num_hidden_layers=2, intermediate_size=130))
    assert "has shape" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(folder)
    edit_config(folder, lambda config: config.update(model_type="unheard-of"))
    assert "has no model_type 'unheard-of'" in refusal(folder)
    edit_config(folder, lambda config: config.update(model_type=["llama"]))
    assert "config.json is not valid" in refusal(folder)
    edit_config(folder, lambda config: config.clear())
    assert "config.json" in refusal(folder)


def test_a_damaged_checkpoint_of_the_second_path_is_refused_too(tmp_path: Path) -> None:
    """Missing tensors are never replaced by random ones."""
    folder = make_checkpoint("GPT2LMHeadModel", tmp_path)
    edit_config(folder, lambda config: config.update(n_layer=3))

    assert "missing keys" in refusal(folder)


def test_settings_out_of_range_are_named(tmp_path: Path) -> None:
    """Too long a sequence, no memory for one block, no such device."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)

    assert "max_model_len: 2000" in refusal(folder, max_model_len=2000)
    with pytest.raises(
        ConfigError, match="kv_cache_memory: 1,000 bytes remain for the KV cache, but one block needs 8,192"
    ):
        make_engine(folder, kv_cache_memory="1KB")
    with pytest.raises(ConfigError, match="block_size"):
        make_engine(folder, block_size=0)
    with pytest.raises(ConfigError, match="device"):
        choose_device("abacus")
