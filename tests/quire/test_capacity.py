"""`quire capacity`: the tables of docs/capacity.md, errors, and no torch."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, LongcatFlashConfig

from quire_server.capacity import (
    Agent,
    Serving,
    num_sessions,
    sessions_with_states,
    weights_bytes,
)
from quire_server.cli.main import main
from quire_server.model_sizes import _CLASS_DEFAULTS, sizes_from_config, sizes_from_params
from records.rules.model_worker import ModelWorker
from shared.model_path import resolve_model
from tests.scheduler_svc.cluster import Cluster
from worker_svc.memory.kv_groups import KVGroups

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "capacity.md").read_text("utf-8")
_MODELS = dict(re.findall(r"^\| (\d+B.*?) \| `(layers=\S+)` \|$", PAGE, re.MULTILINE))
_ROWS = re.findall(r"^\| (\d+B.*?) \| `(|--.*?)` \| (.*) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)

_RECURRENT = "layers=10,kv_heads=2,head_dim=256,parameters=8e9,state=1e8"


def _max_concurrent(tmp_path: Path, *flags: str) -> dict[str, int]:
    out = tmp_path / "capacity.json"
    assert main(["capacity", *flags, "--json", str(out)]) == 0
    return dict(json.loads(out.read_text())["max_concurrent"])


def test_the_table_of_the_page_is_what_the_command_computes(tmp_path: Path) -> None:
    """Every number in the table of models, cards and lengths equals the command's result with the row's flags."""
    computed = []
    for model, flags, *_ in _ROWS:
        found = _max_concurrent(tmp_path, "--gpu-memory=80GB", f"--params={_MODELS[model]}", *flags.split())
        cells = [f"{found[length]:,}" if length in found else "-" for length in ("2048", "4096", "32768")]
        computed.append((model, flags, *cells))

    assert len(computed) == 8
    assert computed == _ROWS


def test_a_card_of_80_gb_and_a_model_of_40_gb(tmp_path: Path) -> None:
    """The page's first exercise: 80 layers, 8 KV heads of 128 elements, 16 bits."""
    command = re.search(r"^\$ quire capacity (.*)$", PAGE, re.MULTILINE)
    assert command is not None

    assert _max_concurrent(tmp_path, *command[1].split()) == {"2048": 46, "4096": 23}


def test_the_claim_of_40_gb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A 70B model with 8 KV heads has 320 KiB per token, so 32 requests of 4,096 tokens fill 40 GiB."""
    found = _max_concurrent(
        tmp_path, f"--params={_MODELS['70B (Llama 3.1)']}", "--kv-cache-memory=40GiB", "--context=4096"
    )

    assert found == {"4096": 32}
    assert "320.00 KiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("params", "billions"),
    [
        (_MODELS["7B, one KV head per query head (Llama 2)"], 6.74),
        (_MODELS["8B (Llama 3.1)"], 8.03),
        (_MODELS["70B (Llama 3.1)"], 70.55),
        ("layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocab=32000,experts=8", 46.70),
    ],
)
def test_weights_are_as_many_as_published(params: str, billions: float) -> None:
    """The formula gives the published numbers of parameters, including a mixture of experts (Mixtral 8x7B)."""
    weights = weights_bytes(sizes_from_params(params), "none", num_positions=0)

    assert weights / 2 / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--params", "layers=2,head_dim=64"], "kv_heads is missing"),
        (["--params", "layers=2,kv_heads=2,head_dim=64", "--gpu-memory", "80GB"], "the weights are not known"),
        (["--params", "layer=2"], "unknown size 'layer'"),
        (["--model", "demo"], "--gpu-memory is missing"),
        (["--model", "demo", "--gpu-memory", "1MB"], "weights take"),
        (["--model", "demo", "--kv-cache-memory", "1KiB"], "kv_cache_memory: 1,024 bytes remain for the KV cache"),
        (["--model", "demo", "--gpu-memory", "80 cards"], "--gpu-memory: '80 cards' is not a size in bytes"),
        (["--model", "demo", "--gpu-memory", "1GB", "--host-cache", "much"], "--host-cache: 'much' is not a size"),
        (["--model", "demo", "--gpu-memory", "1GB", "--kv-cache-memory", "1GB"], "remove it, or --gpu-memory"),
        (["--model", "demo", "--gpu-memory", "1GB", "--context", "4096"], "exceeds the model's 2048 positions"),
        (["--model", "demo", "--gpu-memory", "1GB", "--context", "100"], "--output: 256 is not between 0 and"),
        (["--model", "demo", "--gpu-memory", "1GB", "--gpu-memory-utilization", "90"], "90 is not a share"),
        (["--model", "demo", "--gpu-memory", "1GB", "--tensor-parallel-size", "3"], "does not divide"),
        (["--model", "demo", "--gpu-memory", "1GB", "--state-checkpoints", "-2"], "-2 is too small; use -1"),
        (
            [
                "--params",
                "layers=2,kv_heads=2,head_dim=80,parameters=1e9,positions=64",
                "--gpu-memory",
                "80GB",
                "--kv-cache-dtype",
                "int4",
            ],
            "int4 needs heads whose size is a multiple of 32, not 80; use int8 or auto",
        ),
        (
            ["--params", _RECURRENT, "--kv-cache-memory", "6GB", "--max-num-seqs", "64"],
            "kv_cache_memory: recurrent state takes 6,400,000,000 bytes: 0 bytes remain",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing or impossible size is named."""
    assert main(["capacity", *flags]) == 1

    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_recurrent_state_takes_memory_in_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 rows and 3 checkpoints of 100 MB leave 0.3 of 7 GB for KV; with 20 MB each, rows limit short requests."""
    flags = ("--kv-cache-memory=7GB", "--context=1024,4096", "--output=0", "--max-num-seqs=64")
    large = _max_concurrent(tmp_path, *flags, f"--params={_RECURRENT}")
    small = _max_concurrent(tmp_path, *flags, f"--params={_RECURRENT.replace('1e8', '2e7')}")

    assert large == {"1024": 300_000_000 // (1024 * 20480), "4096": 300_000_000 // (4096 * 20480)}
    assert small == {"1024": 64, "4096": (7_000_000_000 - 151 * 20_000_000) // (4096 * 20480)}
    assert "(64 rows + 3 checkpoints) x 100,000,000 bytes" in capsys.readouterr().out


def test_states_of_default_rows_take_at_most_half_of_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """35 rows and 17 checkpoints of 100 MB leave 1.8 of 7 GB, as in a worker without --max-num-seqs."""
    flags = ("--kv-cache-memory=7GB", "--context=4096", "--output=0", f"--params={_RECURRENT}")

    assert _max_concurrent(tmp_path, *flags) == {"4096": min(35, 1_800_000_000 // (4096 * 20480))}
    assert "(35 rows + 17 checkpoints) x 100,000,000 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "kimi_linear", "kv_lora_rank": 512, "linear_attn_config": {"kda_layers": [1]}},
        {"model_type": "bailing_hybrid", "kv_lora_rank": 512, "layer_group_size": 2},
    ],
)
def test_the_size_of_a_state_is_asked_for(
    fields: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config.json of a hybrid does not show it, so the line names the flag."""
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "vocab_size": 99}
    latent = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    config.write_text(json.dumps({"num_hidden_layers": 2} | sizes | latent | fields))

    assert main(["capacity", "--model", str(config), "--gpu-memory", "80GB"]) == 1
    assert (
        "recurrent state, whose size is not in config.json; pass the sizes with --params: layers, kv_heads and head_dim"
        in capsys.readouterr().err
    )


def test_a_checkpoint_that_a_worker_refuses_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command does not count weights in a format that no worker serves."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("demo", weights=False), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 3}
    (folder / "config.json").write_text(json.dumps(config))

    assert main(["capacity", "--model", str(folder), "--gpu-memory", "80GB"]) == 1
    assert "GPTQ with 3 bits, which is not supported; use" in capsys.readouterr().err


def test_a_draft_model_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The result says that it does not include a draft model."""
    assert main(["capacity", "--kv-cache-memory=64MiB", "--speculation=draft"]) == 0

    assert "The weights and the KV of the draft model are not counted." in capsys.readouterr().out


@pytest.mark.parametrize("model_type", _CLASS_DEFAULTS)
def test_missing_fields_have_the_values_of_the_class(model_type: str) -> None:
    """config.json may lack every field. `transformers` then uses the same sizes and windows."""
    config = AutoConfig.for_model(model_type)
    found = sizes_from_config({"model_type": model_type})

    heads = config.num_attention_heads
    assert (found.num_layers, found.num_heads) == (config.num_hidden_layers, heads)
    assert found.num_kv_heads == (config.num_key_value_heads or heads)
    assert found.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // heads)
    assert (found.hidden_size, found.intermediate_size) == (config.hidden_size, config.intermediate_size)
    assert (found.vocab_size, found.max_positions) == (config.vocab_size, config.max_position_embeddings)
    assert found.tied == config.tie_word_embeddings
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = [window if layer == "sliding_attention" else None for layer in layers]
    assert list(found.windows or [None] * len(windows)) == windows


def test_a_multimodal_file_lacks_most_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of Gemma-3 4B on the hub has few sizes, and is enough without the model's weights."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}, "torch_dtype": "bfloat16"}
    (tmp_path / "only.json").write_text(json.dumps(config))

    assert main(["capacity", "--model", str(tmp_path / "only.json"), "--kv-cache-memory", "8GiB"]) == 0
    shown = capsys.readouterr().out
    assert "2 (key and value) x 34 layers x 4 KV heads x 256 head_dim x 2 bytes" in shown
    assert "29 of 34 layers keep the newest 1,024 tokens" in shown
    assert "Weights        7.76 GB" in shown, "3.88 billion weights"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is too small"),
        ({"hidden_size": -1}, "hidden_size: -1 is too small"),
        ({"sliding_window": 8, "layer_types": 7}, "has a field with an unexpected value"),
        ({"text_config": 5}, "has a field with an unexpected value"),
        ({"head_dim": "64"}, "the weights of model_type None cannot be counted"),
    ],
)
def test_a_file_with_wrong_values_is_refused_in_one_line(
    fields: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever config.json contains, no traceback is shown."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
    model_type = {"model_type": "mistral"} if "layer_types" in fields else {}
    (tmp_path / "config.json").write_text(json.dumps(sizes | model_type | fields))

    assert main(["capacity", "--model", str(tmp_path / "config.json"), "--kv-cache-memory=1GB"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("quire capacity: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_pattern_of_windows_may_have_letters() -> None:
    """EXAONE 4 has "LLLG": three layers with a window, and one without."""
    config = {"model_type": "exaone4", "num_hidden_layers": 8, "sliding_window": 4096}
    windows = sizes_from_config(config | {"sliding_window_pattern": "LLLG"}).windows
    assert windows == (4096, 4096, 4096, None) * 2


def test_no_torch_is_imported() -> None:
    """The command runs where only front ends are installed."""
    code = (
        "import sys; from quire_server.cli.main import main;"
        "assert main(['capacity', '--gpu-memory', '80GB']) == 0;"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )

    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_sessions_of_agents_fit_in_both_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sessions of two turns with 8 and 12 own blocks take 10 on average, and host memory holds more of them."""
    size = 16 * 2 * 2 * 2 * 64 * 2
    flags = [
        "--params=layers=2,kv_heads=2,head_dim=64,parameters=1e6", f"--kv-cache-memory={104 * size}",
        f"--host-cache={50 * size}", "--shared-prefix=64", "--agents=2,128,64", "--dtype=bfloat16", "--context=512",
    ]  # fmt: skip
    out = tmp_path / "capacity.json"
    assert main(["capacity", *flags, "--json", str(out)]) == 0

    assert json.loads(out.read_text())["sessions"] == {"device": 10, "with_host": 15, "with_disk": 15}
    assert "10 sessions at a time keep their KV, 15 with host memory" in capsys.readouterr().out
    assert main(["capacity", *flags[:-3], "--agents=2,128"]) != 0


def test_host_memory_holds_prefixes_of_a_model_with_recurrent_state(capsys: pytest.CaptureFixture[str]) -> None:
    """Each session needs a state, on the device or in host memory. A disk cache is refused."""
    flags = [f"--params={_RECURRENT}", "--gpu-memory=80GB", "--agents=2,128,64", "--host-cache=64GiB"]
    assert main(["capacity", *flags]) == 0
    out = capsys.readouterr().out
    assert "140 checkpoints" in out
    assert "It also holds 171 recurrent states" in out  # A quarter of the host memory.
    assert "46 sessions at a time keep their KV, 217 with host memory" in out  # Three states per session on the device.

    assert main(["capacity", *flags, "--disk-cache-bytes=1TB"]) != 0
    assert "--disk-cache-bytes: recurrent state is not copied to disk" in capsys.readouterr().err


def _lost_turns(num_sessions: int, agent: Agent, num_turns: int, num_blocks: int, **kind: int) -> int:
    """Run sessions one after another, turn by turn; return how many of their last turns were computed again."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=64, prefix_cache="hash")
    cluster.join(
        ModelWorker(b"w/1", num_blocks, 4, 4, max_tokens_per_step=64, max_model_len=4096, **kind)  # type: ignore[arg-type]
    )
    growth, lost = agent.growth // 2, 0
    places = range(agent.first_prompt)
    sequences = [[(7 * session + 3 * place) % 97 for place in places] for session in range(num_sessions)]
    for turn in range(num_turns):
        for session, tokens in enumerate(sequences):
            before, stream = len(cluster.plans), turn * num_sessions + session
            cluster.submit(stream, tokens, growth)
            cluster.run()
            (admission, *_) = (each for plan in cluster.plans[before:] for each in plan.admissions)
            lost += turn == num_turns - 1 and admission.num_computed_tokens < len(tokens) - growth - 8
            tokens += cluster.readers[stream].tokens
            tokens += [(5 * stream + place) % 89 for place in range(growth)]
    return lost


def test_as_many_sessions_with_windows_as_a_scheduler_keeps() -> None:
    """With the computed number, the last turn of each session begins where the turn before ended; with more, not."""
    agent, groups = Agent(5, 40, 24), KVGroups((0, 1, 2), (0, 0, 0), 33)
    longest = Agent(1, agent.tokens(agent.turns - 2), agent.growth)
    number = num_sessions(400, Serving(kv_type="float16", block_size=4), longest, 0, groups)
    kind = {"num_kv_groups": 3, "window": 33, "window_chunk": 8}

    assert number == 5
    assert not _lost_turns(number, agent, agent.turns, 400, **kind)
    assert _lost_turns(number + 3, agent, agent.turns, 400, **kind)


def test_as_many_sessions_with_recurrent_state_as_a_scheduler_keeps() -> None:
    """Each session uses three checkpoints, however many blocks there are."""
    agent, number = Agent(3, 40, 24), sessions_with_states(Serving(kv_type="float16", num_checkpoints=12))
    kind = {"state_bytes": 64, "num_checkpoints": 12}

    assert not _lost_turns(number, agent, agent.turns, 1000, **kind)
    assert _lost_turns(number + 1, agent, agent.turns, 1000, **kind)


def test_agents_are_not_longer_than_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A session that a worker would refuse in its last turn is refused with its length and the limit."""
    flags = ["--kv-cache-memory=512MiB", "--max-model-len=2048"]
    assert main(["capacity", *flags, "--agents=12,1280,64"]) == 0
    assert main(["capacity", *flags, "--agents=13,1280,64"]) != 0

    assert "the last turn ends with 2112 tokens, more than the model's 2048 positions" in capsys.readouterr().err


def test_the_number_of_turns_of_agents_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    """A number of turns that would take hours to add up is refused with the largest one."""
    assert main(["capacity", "--kv-cache-memory=512MiB", f"--agents={10**18},128,64"]) != 0

    assert "use at most 100000" in capsys.readouterr().err


def test_layers_with_two_attention_layers_store_two_latent_vectors() -> None:
    """A layer of LongCat-Flash has two attention layers. Its config.json has the number of layers."""
    config = LongcatFlashConfig()

    sizes = sizes_from_config(config.to_dict())

    assert sizes.num_layers == config.num_hidden_layers == 2 * config.num_layers
