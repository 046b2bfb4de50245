"""Find out which decoders of the installed `transformers` are served, for docs/models.md.

    python -m tools.model_types                      survey all types, and write the result and the page (10 minutes)
    python -m tools.model_types --types olmo2 gemma  survey some, and write them into the result of the last survey

For each type with a causal language model, a tiny checkpoint with random weights is written and served in another
process, with a time limit of five minutes per type. Its greedy tokens are compared with the logits of the class
itself for the same tokens: prompts of 1 to 130 tokens, in chunks of random length, four rows at once. A type is *equal*
if two conditions hold. In float32, no token lags behind the best one by more than rounding. In bfloat16, the mean lag
is no more than that of the class in bfloat16.
"""

import argparse
import copy
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import Any, cast

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from checks.driver import Driver, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, draw_weights, make_tokenizer
from shared.config import ConfigError
from worker_svc.model.base import Model
from worker_svc.model.hf_cache import CacheModel
from worker_svc.model.hf_interface import InterfaceModel
from worker_svc.model.llama import LlamaModel
from worker_svc.model.registry import check_supported

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "measure" / "results" / "model_types.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- types -->", "<!-- /types -->"
_PROMPTS = (1, 5, 33, 130)
_OUTPUT = 16
_LARGEST_LAG = 1e-3
"""Of the largest logit; 0 in most cases."""
_LARGEST_MEAN_LAG = 1e-2
"""Limit for the mean lag in bfloat16, beyond twice the class's lag.

A token may get other experts in a mixture; errors cause a larger lag.
"""
_MAX_MODEL_LEN = 256
_MARK = "finding: "
_SECONDS = 300
"""Time limit of a type."""
_PATHS: dict[type, str] = {LlamaModel: "own code", InterfaceModel: "attention interface", CacheModel: "cache interface"}
_MOST_WEIGHTS = 20_000_000
_HIDDEN, _INNER, _HEADS, _KV_HEADS, _EXPERTS, _LAYERS, _POSITIONS, _WINDOW = 96, 72, 6, 3, 5, 4, 512, 19
_FIELDS: dict[int, str] = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input",
    _HIDDEN: "hidden_size n_embd d_model dim_model word_embed_proj_dim emb_dim embed_dim dim lru_width",
    _INNER: "intermediate_size ffn_hidden_size n_inner ffn_dim d_ff dim_ff decoder_ffn_dim encoder_ffn_dim dff",
    _HEADS: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"
    " encoder_attention_heads mamba_n_heads mamba_num_heads n_mamba_heads swa_num_attention_heads linear_num_heads"
    " linear_num_value_heads",
    _KV_HEADS: "num_key_value_heads n_kv_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads",
    _LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers",
    _POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len",
    _WINDOW: "sliding_window attention_window sliding_window_size local_attention",
    _EXPERTS: "num_local_experts num_experts moe_num_experts router_num_experts",
    40: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    16: "head_dim kv_channels dim_head query_pre_attn_scalar kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
    " index_head_dim state_size ssm_state_size mamba_d_state linear_key_head_dim linear_head_dim",
    24: "q_lora_rank linear_value_head_dim",
    32: "index_n_heads qk_head_dim mamba_d_head mamba_head_dim chunk_size mamba_chunk_size",
    8: "n_routed_experts rotary_dim",
    2 * _HIDDEN: "mamba_d_ssm",
    2: "num_experts_per_tok num_experts_per_token moe_k moe_topk encoder_layers eos_token_id n_groups mamba_n_groups"
    " mamba_ngroups",
    7: "index_topk",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts"
    " first_k_dense_replace num_dense_layers moe_layer_start_index bos_token_id",
    0: "pad_token_id",
}
"""Values of configuration fields: tiny sizes that differ from each other where a class permits it."""
_WANTED: dict[str, Any] = {name: value for value, names in _FIELDS.items() for name in names.split()} | {
    "tie_word_embeddings": False,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 30.0,
    "is_decoder": True,
}
_GEMMA_4 = {
    "attention_k_eq_v": True,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
_PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"n_head": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": _KV_HEADS, "clip_qkv": 2.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": _INNER, "moe_num_experts": _EXPERTS, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "layer_types": ["sliding_attention", "indexed_attention"] * 2,
        "num_key_value_heads": _HEADS,
        "head_dim": 32,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        "swa_q_lora_rank": 20,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 20,
        "shared_experts_intermediate_size": 40,
    },
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gemma4_text": _GEMMA_4
    | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40},
    "gemma4_unified_text": _GEMMA_4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": _WINDOW},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 32},
    "mimo_v2_flash": {"head_dim": 24},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "hc_lowrank": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * 4},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}
"""Fields that a class needs for tiny sizes, or that published models set differently from the class's defaults."""
_TEXT_ONLY = {"gemma3n": "gemma3n_text"}
"""Types whose image encoder needs a library that is not installed, and the type of their text part."""
_KINDS: dict[str, tuple[str, ...]] = {
    "sliding_attention": ("window",),
    "local": ("window",),
    "chunked_attention": ("chunks",),
    "linear_attention": ("state",),
    "conv": ("state",),
    "indexed_attention": ("full", "index"),
    "hybrid": ("full", "state"),
    "hybrid_sliding": ("window", "state"),
    **dict.fromkeys(("moe", "mlp", "dummy"), ()),
}
"""What the cache stores for each kind of layer; for other kinds, keys and values for the whole context."""
_LATENT = {"head_dim": 16, "num_key_value_heads": _HEADS}
"""Sizes of classes whose heads have a part without rotation."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one type."""

    architecture: str
    status: str
    """One of `_PATHS` if the type is served with equal tokens, else "refused", "different" or "not built"."""
    why: str = ""
    kinds: str = ""
    """What the cache has: "full", "window", "chunks", "latent", "index" or "state", joined by commas."""


def survey(model_type: str) -> Finding:
    """Serve a tiny checkpoint of a type, and compare its tokens with the class's own logits."""
    architecture = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    text_type = _TEXT_ONLY.get(model_type, model_type)
    try:
        model = _tiny(text_type)
    except Exception as error:  # classes without defaults, or with rules for sizes of their own
        return Finding(architecture, *_by_its_defaults(architecture, model_type, error))
    with tempfile.TemporaryDirectory() as scratch:
        folder, written = Path(scratch, "served"), Path(scratch, text_type)
        draw_weights(model, 0.2, 0)
        model.save_pretrained(written)
        make_tokenizer().save_pretrained(written)
        model = _read(model, written, torch.float32)  # some classes read another model than the one they wrote
        if text_type == model_type:
            folder = written
        else:
            _write_whole(model_type, architecture, written, folder)
        served: Model | None = None
        for dtype in ("bfloat16", "float32"):
            try:
                engine = make_engine(
                    folder,
                    block_size=16,
                    max_num_seqs=len(_PROMPTS),
                    max_num_batched_tokens=300,
                    max_model_len=_MAX_MODEL_LEN,
                    dtype=dtype,
                )
            except ConfigError as error:
                return Finding(architecture, "refused", _reason(str(error)))
            served = engine._model
            lag, most = _lags(model, written, _generate(Driver(engine)), dtype)
            if not lag <= most:
                return Finding(architecture, "different", f"lags by {lag:.1%} in {dtype}")
    return Finding(architecture, _PATHS[type(served)], kinds=_kinds(model.config, served))


def _write_whole(model_type: str, architecture: str, text: Path, folder: Path) -> None:
    """Write the checkpoint of a text part as that of a model for several media, with the names of the hub."""
    made: Any = CONFIG_MAPPING[model_type]
    config = made(text_config=json.loads((text / "config.json").read_text("utf-8")))
    shutil.copytree(text, folder)
    whole = config.to_dict() | {"architectures": [architecture], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole), "utf-8")
    tensors = load_file(text / "model.safetensors")
    save_file(
        {re.sub("^model[.]", "model.language_model.", name): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def _tiny(model_type: str) -> PreTrainedModel:
    """Return a type's decoder with small sizes; the first one that its class accepts.

    Raises:
        Exception: it accepts none.
    """
    config_class, maker = CONFIG_MAPPING[model_type], cast(Any, AutoModelForCausalLM)
    base = config_class()
    failure: Exception = ValueError("no attempt")
    for config in _attempts(config_class, base):
        try:
            values = config()
            with torch.device("meta"):
                size = maker.from_config(values, dtype=torch.float32).num_parameters()
            if size > _MOST_WEIGHTS:
                raise ValueError(f"{size} parameters")
            torch.manual_seed(0)
            made = maker.from_config(values, dtype=torch.float32, attn_implementation="eager")
            return cast(PreTrainedModel, made.eval())
        except Exception as error:
            failure = error
    raise failure


def _attempts(config_class: Any, base: PretrainedConfig) -> Iterator[Any]:
    """Yield functions that make a configuration, the most particular first."""
    own = _known(base) | _PARTICULAR.get(base.model_type, {})
    without_head_dim = {name: value for name, value in own.items() if name != "head_dim"}
    all_heads = _fitting(base, {"num_key_value_heads": _HEADS})
    choices = [own, without_head_dim, without_head_dim | all_heads]
    if _fitting(base, {"qk_rope_head_dim": 0}):
        choices.insert(0, own | _fitting(base, _LATENT) | _PARTICULAR.get(base.model_type, {}))
    text = base.get_text_config(decoder=True)
    parts = {name: getattr(base, name, None) for name in ("vision_config", "audio_config")}
    others = {name: _known(part) for name, part in parts.items() if isinstance(part, PretrainedConfig)}
    if text is not base:
        choices.insert(0, {"text_config": _known(text) | _PARTICULAR.get(text.model_type, {}), **others})
    elif others:
        choices.insert(0, own | others)
    for values in choices:
        kinds = list(dict.fromkeys(getattr(base, "layer_types", None) or ()))
        if kinds and "layer_types" not in values:  # as many layers of each kind
            yield lambda values=values, kinds=kinds: config_class(**values, layer_types=(kinds * _LAYERS)[:_LAYERS])
        yield lambda values=values: config_class(**values)


def _known(config: PretrainedConfig) -> dict[str, Any]:
    """Return the wanted values for those fields that a configuration has, each under one of its names."""
    aliases: Mapping[str, str] = getattr(type(config), "attribute_map", None) or {}
    values = _fitting(config, _WANTED)
    return {
        name: value for name, value in values.items() if aliases.get(name, name) == name or aliases[name] not in values
    }


def _fitting(config: PretrainedConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    differing = config.per_layer_attributes or ()  # The class does not return these for all layers.
    return {
        name: value
        for name, value in values.items()
        if name in differing or (hasattr(config, name) and not isinstance(getattr(type(config), name, None), property))
    }


def _by_its_defaults(architecture: str, model_type: str, failure: Exception) -> tuple[str, str]:
    """Return status and reason of a type without a tiny checkpoint, from its default configuration."""
    try:
        config = CONFIG_MAPPING[model_type]()
        if getattr(config, "is_heterogeneous", False):
            return "refused", "it has layers of different sizes"
        check_supported(architecture, config)
    except ConfigError as error:
        return "refused", _reason(str(error))
    except Exception as error:
        failure = error
    return "not built", f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"[:120]


def _reason(message: str) -> str:
    """Return the reason of a refusal without what differs between models."""
    found = re.search(r"is not supported: (.*?); use", message)
    text = re.sub(r" by [\d.]+%| \(.*\)$|its \d+ (?=layers)", "", found.group(1)) if found else message
    return re.sub("the decoder of model_type .*", "its decoder in transformers is another class", text)


def _generate(driver: Driver) -> list[tuple[list[int], int]]:
    """Return each row's tokens after a random schedule, with its prompt length."""
    prompts = [driver.rng.integers(3, VOCAB_SIZE, length).tolist() for length in _PROMPTS]
    rows = {driver.admit(prompt): prompt for prompt in prompts}
    while rows:
        for row in rows:
            if driver.rows[row].in_prefill:
                left = driver.rows[row].num_known - driver.rows[row].computed
                driver.chunk(row, int(driver.rng.integers(1, min(40, left) + 1)))
        driver.step()
        for row, prompt in list(rows.items()):
            if len(driver.rows[row].tokens) - len(prompt) >= _OUTPUT:
                del rows[row]
    return [
        (driver.rows[row].tokens[: len(prompt) + _OUTPUT], len(prompt))
        for row, prompt in zip(list(driver.rows), prompts, strict=True)
    ]


def _read(model: PreTrainedModel, folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the checkpoint of a model as its class reads it."""
    made = cast(Any, type(model)).from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return cast(PreTrainedModel, made.eval())


def _lags(
    model: PreTrainedModel, folder: Path, answers: Sequence[tuple[list[int], int]], dtype: str
) -> tuple[float, float]:
    """Return how far logits of generated tokens are below the best ones, relative to the largest logit, and a limit.

    In float32, the result is the largest lag. In bfloat16, rounding may choose other tokens, so the result is the mean
    lag, and the limit is twice that of the class's own choices in bfloat16. The reference logits are computed in
    float32 from weights in `dtype`.
    """
    if dtype == "float32":
        return max(float(_lag(model, *answer).max()) for answer in answers), _LARGEST_LAG
    rounded = _read(model, folder, torch.bfloat16)
    exact = copy.deepcopy(model)
    for weight in exact.parameters():
        weight.data.copy_(weight.bfloat16())
    served = [float(_lag(exact, *answer).mean()) for answer in answers]
    own = [float(_lag(exact, *answer, chosen_by=rounded).mean()) for answer in answers]
    return sum(served) / len(served), 2 * sum(own) / len(own) + _LARGEST_MEAN_LAG


@torch.inference_mode()
def _lag(
    judge: PreTrainedModel, tokens: list[int], start: int, chosen_by: PreTrainedModel | None = None
) -> torch.Tensor:
    """Return the lag of each token from `start`, or of the tokens that another model would choose there."""
    given = torch.tensor([tokens])
    logits = judge(given, use_cache=False).logits[0, start - 1 : -1].float()
    if chosen_by is None:
        choices = given[0, start:]
    else:
        choices = chosen_by(given, use_cache=False).logits[0, start - 1 : -1].argmax(-1)
    behind: torch.Tensor = logits.amax(-1) - logits.gather(1, choices[:, None])[:, 0]
    return cast(torch.Tensor, behind / logits.abs().amax())


def _kinds(config: PretrainedConfig, served: Model | None) -> str:
    text: Any = config.get_text_config(decoder=True)
    layers = set(getattr(text, "layer_types", None) or getattr(text, "attention_layers", None) or ["full_attention"])
    kinds = {kind for layer in layers for kind in _KINDS.get(layer, ("full",))}
    if isinstance(served, CacheModel | InterfaceModel) and _is_latent(text):
        kinds = (kinds - {"full"}) | {"latent"}
    if isinstance(served, InterfaceModel) and "latent" not in kinds:
        kinds = {"full" if window is None else "window" for window in served.windows}
    elif layers == {"full_attention"} and getattr(text, "sliding_window", None):
        kinds = {"window"} if getattr(text, "use_sliding_window", True) else kinds
    return ", ".join(sorted(kinds))


def _is_latent(text: PretrainedConfig) -> bool:
    return "kv_lora_rank" in (text.per_layer_attributes or ()) or bool(getattr(text, "kv_lora_rank", None))


def surveyed(types: Sequence[str]) -> Iterator[tuple[str, Finding]]:
    """Yield each type's finding, each from a separate process with a time limit."""
    left = list(types)
    while left:
        command = [sys.executable, "-m", "tools.model_types", "--in-this-process", *left]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            line = "start"
            while left and line:
                timer = Timer(_SECONDS, process.kill)
                timer.start()
                line = next((each for each in process.stdout if each.startswith(_MARK)), "")
                timer.cancel()
                model_type = left.pop(0)
                if line:
                    yield model_type, Finding(**json.loads(line.removeprefix(_MARK)))
                else:
                    architecture = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
                    yield model_type, Finding(architecture, "different", f"no result within {_SECONDS} s")


def _survey_here(types: Iterable[str]) -> None:
    """Survey types in this process, and print a line for each."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for model_type in types:
        try:
            finding = survey(model_type)
        except Exception as error:  # a defect: the worker would have ended
            architecture = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
            finding = Finding(architecture, "different", repr(error).replace("\n", " ")[:120])
        print(f"{_MARK}{json.dumps(asdict(finding))}", flush=True)


def section(findings: Mapping[str, Finding], version: str) -> str:
    """Return the part of the page that the tool writes."""
    served = {name: each for name, each in sorted(findings.items()) if each.status in _PATHS.values()}
    refused: dict[str, list[str]] = defaultdict(list)
    for model_type, finding in findings.items():
        if finding.status == "refused":
            refused[finding.why].append(model_type)
    counts = (f"{sum(each.status == path for each in served.values())} by {path}" for path in _PATHS.values())
    lines = [
        f"Of the {len(findings)} types of decoders in transformers {version}, {len(served)} are served with equal"
        f" tokens ({', '.join(counts)}) and {sum(map(len, refused.values()))} are refused:",
        *("", "| `model_type` | class | implementation | KV |", "|---|---|---|---|"),
        *(f"| `{name}` | `{each.architecture}` | {each.status} | {each.kinds} |" for name, each in served.items()),
        *("", "These types are refused in one line:", "", "| reason | `model_type` |", "|---|---|"),
        *(
            f"| {why} | {_list(sorted(names))} |"
            for why, names in sorted(refused.items(), key=lambda each: (-len(each[1]), each[0]))
        ),
    ]
    others = sorted(name for name, finding in findings.items() if finding.status in ("not built", "different"))
    if others:
        lines += ["", f"Not tested, because no tiny model could be made: {_list(others)}."]
    return "\n".join(lines)


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def written(page: str, text: str) -> str:
    """Return the page with the part between the markers replaced."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def read_result() -> tuple[dict[str, Finding], str]:
    """Return the last survey's findings, and the version of `transformers`."""
    result = json.loads(RESULT.read_text("utf-8"))
    return {name: Finding(**each) for name, each in result["types"].items()}, result["transformers"]


def main() -> None:
    """Survey types, and print or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", help="types to survey; default: all")
    parser.add_argument("--in-this-process", nargs="+", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_this_process:
        _survey_here(arguments.in_this_process)
        return
    chosen = arguments.types
    findings = read_result()[0] if chosen else {}
    for model_type, finding in surveyed(chosen or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        findings[model_type] = finding
        print(model_type, *asdict(finding).values(), sep=": ", flush=True)
    types = {name: asdict(finding) for name, finding in findings.items()}
    RESULT.write_text(json.dumps({"transformers": transformers.__version__, "types": types}, indent=1) + "\n", "utf-8")
    PAGE.write_text(written(PAGE.read_text("utf-8"), section(findings, transformers.__version__)), "utf-8")


if __name__ == "__main__":
    main()
