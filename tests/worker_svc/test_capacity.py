"""`quire capacity` against what a worker allocates."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from checks.driver import CPU, make_engine
from measure.testbed.checkpoints import edit_config, make_checkpoint
from measure.testbed.quantised_checkpoints import make_gguf, make_pair
from measure.testbed.storages import bytes_of
from quire_server.capacity import kv_bytes, kv_formula
from quire_server.cli.main import main
from quire_server.model_sizes import sizes_from_config
from shared.config import ConfigError, WorkerConfig
from shared.model_path import resolve_model
from tests.gemma_4 import GEMMA_4
from worker_svc.memory.kv_pool import block_bytes
from worker_svc.model.loader import load_model
from worker_svc.ranks.group import Group
from worker_svc.ranks.shard import Shard


def predicted_memory(
    tmp_path: Path, folder: Path, *flags: str, memory: tuple[str, ...] = ("--kv-cache-memory", "6MiB")
) -> dict[str, Any]:
    out = tmp_path / "capacity.json"
    command = ["capacity", "--model", str(folder), *memory, "--json", str(out), *flags]
    assert main(command) == 0
    return dict(json.loads(out.read_text()))


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("demo", {}),
        ("demo", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("demo", {"quantization": "int4", "dtype": "bfloat16"}),
        ("demo", {"kv_cache_dtype": "int4", "dtype": "bfloat16"}),
        ("LlamaForCausalLM", {"dtype": "bfloat16", "block_size": 32}),
        ("Qwen2ForCausalLM", {"kv_cache_dtype": "fp8", "max_model_len": 300}),
        ("Gemma2ForCausalLM", {}),
        ("Gemma3ForCausalLM", {"dtype": "bfloat16"}),
        ("Gemma3nForCausalLM", {}),
        ("Gemma4ForCausalLM", {"kv_cache_dtype": "int8"}),
        ("E2B", {"dtype": "bfloat16"}),
        ("26B-A4B", {}),
        ("31B", {"max_model_len": 600}),
        ("MistralForCausalLM", {"dtype": "bfloat16"}),
        ("MistralForCausalLM", {"kv_cache_dtype": "int8", "max_model_len": 600}),
        ("GPT2LMHeadModel", {}),
        ("DeepseekV3ForCausalLM", {}),
        ("DeepseekV3ForCausalLM", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    ],
)
def test_the_formulas_are_what_a_worker_allocates(model: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Blocks are equal, and bytes of weights and KV cache are within 3 %, for each kind of weights and KV."""
    if model == "demo":
        folder = resolve_model("demo", weights=True)
    elif model in GEMMA_4:
        folder = make_checkpoint("Gemma4ForCausalLM", tmp_path / "model", **GEMMA_4[model])
    else:
        folder = make_checkpoint(model, tmp_path / "model")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]

    predicted = predicted_memory(tmp_path, folder, "--context=64", "--output=8", *flags)

    engine = make_engine(folder, kv_cache_memory="6MiB", **settings)
    weights = bytes_of(load_model(WorkerConfig(model=str(folder), device="cpu", **settings), CPU)[0])
    cache = engine.limits.num_blocks * predicted["bytes_per_block"]
    assert predicted["per_card"]["num_blocks"] == engine.limits.num_blocks
    assert tuple(predicted["kv_by_kind"]) == engine.limits.cache_kinds
    assert predicted["weights_bytes"] == pytest.approx(weights, rel=0.03)
    assert bytes_of(vars(engine)["_caches"]) == pytest.approx(cache, rel=0.03)


def test_layers_of_different_sizes_count_with_their_own_sizes(tmp_path: Path) -> None:
    """Gemma 4 from the hub names the other sizes of its layers without a window, and saved files each layer."""
    kinds = ["sliding_attention", "full_attention"] * 3
    folder = make_checkpoint("Gemma4ForCausalLM", tmp_path / "model", num_hidden_layers=6, layer_types=kinds)
    saved = sizes_from_config(json.loads((folder / "config.json").read_text()))

    def as_on_the_hub(config: dict[str, Any]) -> None:
        del config["per_layer_config"]
        config |= {"global_head_dim": 32, "num_global_key_value_heads": 1}

    edit_config(folder, as_on_the_hub)
    config = json.loads((folder / "config.json").read_text())

    assert sizes_from_config(config) == saved
    assert saved.kv_sizes == ((2, 16), (1, 32)) * 2
    assert kv_formula(saved, "bfloat16") == (
        "2 (key and value) x 2 layers x 2 KV heads x 16 head_dim x 2 bytes"
        " + 2 (key and value) x 2 layers x 1 KV heads x 32 head_dim x 2 bytes"
    )
    assert kv_bytes(saved, "bfloat16") == 2 * 2 * 2 * (2 * 16 + 32)
    assert sizes_from_config({"text_config": config}).kv_sizes == saved.kv_sizes


def test_windows_count_with_their_newest_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request with windows needs the blocks that a row holds; with a disk, all layers keep all tokens."""
    folder = make_checkpoint("GptOssForCausalLM", tmp_path / "model", sliding_window=64, max_position_embeddings=4096)
    flags = ("--context=64,4096", "--output=8")
    freed = predicted_memory(tmp_path, folder, *flags)
    kept = predicted_memory(tmp_path, folder, *flags, "--host-cache=1MiB", "--disk-cache-bytes=8MiB")
    on_host = predicted_memory(tmp_path, folder, *flags, "--host-cache=1MiB")

    engine = make_engine(folder, kv_cache_memory="6MiB")
    assert freed["per_card"]["num_blocks"] == engine.limits.num_blocks
    assert freed["bytes_per_block"] == engine.limits.block_bytes
    assert tuple(freed["kv_by_kind"]) == engine.limits.cache_kinds == ("full", "window")
    per_token = kept["kv_bytes_per_token"]
    period = (64 + 384 - 2 + 15) // 16 + 1
    assert freed["kv_by_kind"]["window"]["tokens"] == 64
    assert {each["bytes_per_token"] for each in freed["kv_by_kind"].values()} == {per_token // 2}
    assert set(kept["kv_by_kind"]) == {"full"}
    num_host_tokens = on_host.pop("host_cache_tokens")
    assert num_host_tokens == (1 << 20) // (2 * on_host["bytes_per_block"]) * 16
    assert on_host.items() <= freed.items()
    assert [row["blocks_per_request"] for row in freed["lengths"]] == [8, 256 + period]
    assert [row["kv_bytes_per_request"] for row in kept["lengths"]] == [64 * per_token, 4096 * per_token]

    page = [f"--model={folder}", "--kv-cache-memory=64MiB", *flags]
    for others, line in (
        ((), "layers keep the newest 64 tokens"),
        (("--host-cache=1MiB",), f"holds cached prefixes of at least {num_host_tokens:,} tokens more"),
        (("--host-cache=1MiB", "--disk-cache-bytes=8MiB"), "not freed with --disk-cache-bytes"),
        (("--speculation=draft",), "not freed with a draft model"),
        (("--host-cache=1GiB", "--agents=2,512,512"), ", at least "),
        (("--agents=2,512,512",), "A session keeps the windows before the start, the end of the prompt"),
    ):
        assert main(["capacity", *page, *others]) == 0
        assert line in capsys.readouterr().out
    assert main(["capacity", f"--model={folder}", "--gpu-memory=8GB", *flags]) == 0
    assert "not freed on a GPU; all layers keep all tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "flags", "line"),
    [
        (
            "E2B",
            (),
            "4 of 5 layers keep the newest 16 tokens and a step; a block holds 1 layer without a window, or 2 with",
        ),
        ("26B-A4B", (), "a block holds 1 layer without a window, or 1/2 of the tokens of as many with one"),
        ("31B", ("--kv-cache-dtype=int8",), "not freed with --kv-cache-dtype int8; all layers keep all tokens"),
    ],
)
def test_the_page_says_how_layers_of_two_sizes_are_kept(
    name: str, flags: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If layers with a window have another size, the text has the layers of a block, or why windows are not freed."""
    folder = make_checkpoint("Gemma4ForCausalLM", tmp_path / "model", **GEMMA_4[name])

    assert main(["capacity", f"--model={folder}", "--kv-cache-memory=6MiB", "--context=64", "--output=8", *flags]) == 0
    assert line in capsys.readouterr().out


_OPTIONAL = {"sliding_window": 16, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("model", "fields", "omitted"),
    [
        ("MistralForCausalLM", {}, ()),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MistralForCausalLM", {"max_position_embeddings": 8192}, ("sliding_window",)),
        ("MixtralForCausalLM", {}, ()),
        ("Phi3ForCausalLM", {"sliding_window": 16}, ()),
        ("MinistralForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, ()),
        ("MinistralForCausalLM", {}, ("layer_types",)),
        ("Qwen2ForCausalLM", _OPTIONAL | {"use_sliding_window": True, "max_window_layers": 1}, ("layer_types",)),
        ("Qwen3ForCausalLM", _OPTIONAL | {"use_sliding_window": True, "max_window_layers": 3}, ()),
        ("Qwen3ForCausalLM", _OPTIONAL | {"use_sliding_window": False}, ("layer_types",)),
        ("Gemma2ForCausalLM", {}, ()),
        *(("Gemma4ForCausalLM", fields, ()) for fields in GEMMA_4.values()),
        ("Gemma4ForCausalLM", {"num_hidden_layers": 8, "layer_types": None}, ("layer_types",)),
    ],
)
def test_windows_are_those_of_the_model(
    model: str, fields: dict[str, Any], omitted: tuple[str, ...], tmp_path: Path
) -> None:
    """config.json gives the windows that the loaded model reports, with and without `layer_types`."""
    folder = make_checkpoint(model, tmp_path / "model", **fields)
    file = folder / "config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name not in omitted}
    file.write_text(json.dumps(config))
    loaded, _ = load_model(WorkerConfig(model=str(folder), device="cpu"), CPU)

    sizes = sizes_from_config(config)
    assert (sizes.windows or (None,) * len(loaded.windows)) == loaded.windows
    shapes = [(shape.num_kv_heads, shape.head_dim) for shape in loaded.kv_shapes]
    assert list(sizes.kv_sizes or [(sizes.num_kv_heads, sizes.head_dim)] * sizes.num_layers) == shapes


@pytest.mark.parametrize(("speculation", "checkpoints"), [("off", -1), ("ngram", -1), ("off", 5)])
def test_states_of_rows_with_drafts(speculation: str, checkpoints: int, tmp_path: Path) -> None:
    """With drafts, a row has two states: rows, checkpoints, blocks and states on the host equal those of a worker."""
    folder = make_checkpoint("Lfm2ForCausalLM", tmp_path / "model")
    settings: dict[str, Any] = {"speculation": speculation, "state_checkpoints": checkpoints, "host_cache": "1MiB"}
    engine = make_engine(folder, kv_cache_memory="2MiB", **settings)
    shape = vars(engine)["_model"].kv_shapes
    config = json.loads((folder / "config.json").read_text())
    sizes = f"layers={len(shape)},kv_heads={shape[0].num_kv_heads},head_dim={shape[0].head_dim},parameters=1e6"
    sizes += f",state={engine.limits.state_bytes},positions={config['max_position_embeddings']}"

    out = tmp_path / "capacity.json"
    flags = ("--kv-cache-memory=2MiB", f"--speculation={speculation}", "--dtype=float32", "--context=64", "--output=8")
    others = (f"--state-checkpoints={checkpoints}", "--host-cache=1MiB")
    assert main(["capacity", "--params", sizes, "--json", str(out), *flags, *others]) == 0
    found = json.loads(out.read_text())
    card = found["per_card"]
    assert tuple(found["kv_by_kind"]) == engine.limits.cache_kinds == ("full", "state")
    limits, states_per_row = engine.limits, 1 if speculation == "off" else 2
    assert card["state"] == (limits.max_rows * states_per_row + limits.num_checkpoints) * limits.state_bytes
    assert card["num_blocks"] == limits.num_blocks
    assert found["host_cache_states"] == limits.num_host_states > limits.max_rows
    assert found["host_cache_tokens"] == limits.num_host_blocks * limits.block_size


@pytest.mark.parametrize("model", ["LlamaForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM"])
def test_host_memory_that_holds_no_block_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker and `quire capacity` name the least size. With it, a worker starts and has blocks for one prefix."""
    sizes = {"sliding_window": 64, "max_position_embeddings": 4096} if model == "GptOssForCausalLM" else {}
    folder = make_checkpoint(model, tmp_path / "model", **sizes)
    too_little = "1KiB"
    if model == "Qwen3NextForCausalLM":
        # Enough for the state of a row, but not for a block with so many tokens.
        too_little = str(4 * make_engine(folder, kv_cache_memory="6MiB").limits.state_bytes)
    settings: dict[str, Any] = {"kv_cache_memory": "6MiB", "block_size": 1024}
    with pytest.raises(ConfigError, match=r"host_cache: .* use at least [0-9,]+, or 0") as refused:
        make_engine(folder, host_cache=too_little, **settings)

    least = re.findall(r"at least ([0-9,]+)", str(refused.value))[0].replace(",", "")
    limits = make_engine(folder, host_cache=least, **settings).limits
    assert limits.num_host_blocks == limits.num_kv_groups
    if not limits.state_bytes:
        flags = ("--kv-cache-memory=6MiB", "--block-size=1024", f"--host-cache={too_little}")
        assert main(["capacity", "--model", str(folder), *flags]) == 1
        assert str(refused.value) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "architecture"),
    [
        *((layout, "LlamaForCausalLM") for layout in ("ct-int8-channel", "ct-int8-packed", "ct-int4", "ct-int4-zeros")),
        *((layout, "Qwen3ForCausalLM") for layout in ("gptq-int4", "gptq-int8", "gptq-int4-order", "awq", "fp8-block")),
        ("awq", "Gemma2ForCausalLM"),
        ("ct-int8-channel", "Gemma2ForCausalLM"),
    ],
)
def test_a_quantised_checkpoint_is_counted_as_a_worker_holds_it(layout: str, architecture: str, tmp_path: Path) -> None:
    """Weights that the CPU kernels hold as stored, and weights that are dequantised, are within 3 %."""
    folder = make_pair(layout, tmp_path, architecture, hidden_size=256).quantised  # several groups per output

    predicted = predicted_memory(tmp_path, folder, "--context=64", "--output=8")

    weights = bytes_of(load_model(WorkerConfig(model=str(folder), device="cpu"), CPU)[0])
    assert predicted["weights_bytes"] == pytest.approx(weights, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("Q8_0", {}),
        ("Q4_0", {"dtype": "bfloat16"}),
        ("Q4_K_M", {"dtype": "bfloat16"}),
        ("Q5_1", {}),
        ("Q4_K", {"quantization": "int8"}),
    ],
)
def test_a_gguf_checkpoint_is_counted_as_a_worker_holds_it(kind: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """Weights have the types of the file, or are dequantised or quantised again; bytes are within 3 %."""
    folder = make_gguf(kind, tmp_path).quantised
    options = [f"--{name}={value}" for name, value in flags.items()]

    predicted = predicted_memory(tmp_path, folder, "--context=64", "--output=8", *options)

    weights = bytes_of(load_model(WorkerConfig(model=str(folder), device="cpu", **flags), CPU)[0])
    assert predicted["weights_bytes"] == pytest.approx(weights, rel=0.03)


@pytest.mark.parametrize(
    ("ranks", "sizes_of_heads"),
    [
        (2, {}),
        (4, {}),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 192}),
    ],
)
def test_the_formulas_are_what_each_rank_allocates(ranks: int, sizes_of_heads: dict[str, int], tmp_path: Path) -> None:
    """Bytes of a rank's weights and of its KV per token are within 3 %, even with copied KV heads."""
    folder = make_checkpoint(
        "Qwen2ForCausalLM", tmp_path / "model", vocab_size=1024, max_position_embeddings=64, **sizes_of_heads
    )
    flags = (f"--tensor-parallel-size={ranks}", "--gpu-memory=10MB", "--context=64", "--output=8", "--step-memory=0")
    predicted = predicted_memory(tmp_path, folder, *flags, memory=())
    sizes = sizes_from_config(json.loads((folder / "config.json").read_text()))

    for rank in range(ranks):
        group = Group(Shard(rank, ranks))
        model, description = load_model(WorkerConfig(model=str(folder), device="cpu"), CPU, group)
        assert predicted["per_card"]["weights"] == pytest.approx(bytes_of(model), rel=0.03)
        assert kv_bytes(sizes, "float32", ranks) == block_bytes(model.kv_shapes, 1, description.kv_dtype)


@pytest.mark.parametrize("model", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"])
def test_config_json_alone_is_enough(model: str, tmp_path: Path) -> None:
    """The weights of these families are counted without the files that contain them."""
    folder = make_checkpoint(model, tmp_path / "model")
    shutil.copy(folder / "config.json", tmp_path / "config.json")

    assert predicted_memory(tmp_path, tmp_path / "config.json", "--context=64", "--output=8") == predicted_memory(
        tmp_path, folder, "--context=64", "--output=8"
    ) | {"model": str(tmp_path / "config.json")}
