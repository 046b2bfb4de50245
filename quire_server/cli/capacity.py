"""Computes how many requests a card holds: bytes of weights, bytes of KV, and requests at given lengths.

The model is 'demo', the folder of a checkpoint, a config.json, or sizes (--params). No weights are needed and no model
is loaded. --params takes NAME=NUMBER, separated by commas: layers, kv_heads and head_dim, then parameters (number of
weights), or hidden, heads, intermediate and vocab; positions, experts and state (bytes of recurrent state per row) are
optional.

A worker measures the memory of a step at its start; this command estimates it. --tensor-parallel-size divides weights
and KV heads by formula; tensor parallelism has not been run on several GPUs yet.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from quire_server.cli._config import DTYPE_ALIASES
from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from quire_server.capacity import Agent, Concurrency, Memory, Serving
    from quire_server.gguf_header import GgufTensor
    from quire_server.model_sizes import ModelSizes
    from worker_svc.memory.kv_groups import KVGroups

EXAMPLES = """
  quire capacity --model ~/models/my-model --gpu-memory 80GB
  quire capacity --model config.json --gpu-memory 24GB --context 4096 --output 512 --shared-prefix 1000
  quire capacity --params layers=80,kv_heads=8,head_dim=128,parameters=70.6e9 --gpu-memory 80GB --tensor-parallel-size 4
  quire capacity --model demo --kv-cache-memory 512MiB --json capacity.json
  quire capacity --model ~/models/my-model --gpu-memory 80GB --host-cache 128GiB --agents 12,4096,512
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--model", default="demo", help="'demo', a checkpoint folder, a config.json, or a hub id (default: demo)")
    add("--params", metavar="NAME=NUMBER,…", help="model sizes instead of --model")
    add("--gpu-memory", metavar="SIZE", help="memory of one card, for example 80GB or 24GiB")
    add(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="share for the worker (default: 0.9)"
    )
    add("--step-memory", metavar="SIZE", help="memory of a step's activations (default: an estimate)")
    add("--kv-cache-memory", metavar="SIZE", help="memory for KV only, as on a CPU, instead of --gpu-memory")
    add("--host-cache", metavar="SIZE", default="0", help="host memory for cached prefixes, per card (default: 0)")
    add("--disk-cache-bytes", metavar="SIZE", default="0", help="disk space for cached prefixes, per card (default: 0)")
    add("--context", metavar="N,…", help="tokens of a request, prompt and output (default: 2048,4096,32768)")
    add("--output", type=int, default=256, metavar="N", help="tokens of a request that are generated (default: 256)")
    add(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="tokens in a prefix shared by all prompts (default: 0)",
    )
    add("--agents", metavar="TURNS,FIRST,GROWTH", help="sessions: turns, tokens of the first prompt, tokens per turn")
    add("--dtype", type=lambda word: DTYPE_ALIASES.get(word, word), choices=("auto", "float32", "bfloat16", "float16"),
        default="auto", help="type of weights and KV (default: as in config.json)")  # fmt: skip
    add("--quantization", choices=("none", "int8", "int4", "fp8"), default="none", help="weights")
    add("--kv-cache-dtype", choices=("auto", "fp8", "int8", "int4"), default="auto", help="KV; auto: as the weights")
    add("--block-size", type=int, default=16, metavar="N", help="tokens per KV block (default: 16)")
    add("--max-num-seqs", type=int, metavar="N", help="running requests (default: 256, with --kv-cache-memory 64)")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="tokens per step (default: 8192)")
    add("--max-model-len", type=int, default=0, metavar="N", help="longest sequence (default: the model's positions)")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="number of cards that share the model")
    add("--state-checkpoints", type=int, default=-1, metavar="N", help="saved recurrent states (default: as a worker)")
    add("--speculation", choices=("off", "ngram", "draft"), default="off", help="drafts (default: off)")
    add("--json", type=Path, metavar="FILE", help="also write the result to this file")


def run(options: Namespace) -> int:
    """Compute and print."""
    from quire_server.capacity import (
        Serving,
        block_bytes,
        concurrency,
        fit,
        host_states,
        kv_by_kind,
        kv_bytes,
        kv_formula,
        kv_groups,
        num_sessions,
        sessions_with_states,
        step_bytes,
        weights_bytes,
        with_states,
    )
    from shared.config import parse_bytes
    from shared.kv_sizes import count_host_blocks, unsuitable_heads

    is_default = options.max_num_seqs is None
    options.max_num_seqs = (256 if options.kv_cache_memory is None else 64) if is_default else options.max_num_seqs
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
        if getattr(options, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')}: {getattr(options, name)} is too small; use at least 1")
    if options.state_checkpoints < -1:
        raise CommandError(f"--state-checkpoints: {options.state_checkpoints} is too small; use -1 for the default")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise CommandError(
            f"--gpu-memory-utilization: {options.gpu_memory_utilization:g} is not a share; use more than 0, at most 1"
        )
    _check_memory(options)
    sizes = _model(options)
    if options.dtype != "auto":
        sizes = dataclasses.replace(sizes, dtype=options.dtype)
    serving = Serving(
        kv_type=sizes.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        quantization=options.quantization,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        max_rows=options.max_num_seqs,
        max_tokens_per_step=options.max_num_batched_tokens,
        tensor_parallel_size=options.tensor_parallel_size,
        frees_windows=options.kv_cache_memory is not None
        and options.speculation != "draft"
        and not parse_bytes(options.disk_cache_bytes),
        kv_cache_memory=0 if options.kv_cache_memory is None else parse_bytes(options.kv_cache_memory),
        states_per_row=1 if options.speculation == "off" else 2,
    )
    if reason := unsuitable_heads(serving.kv_type, [sizes.head_dim, sizes.rotary_dim or sizes.head_dim]):
        raise CommandError(f"--kv-cache-dtype: {reason}")
    if sizes.num_heads % serving.tensor_parallel_size:
        raise CommandError(
            f"--tensor-parallel-size: {serving.tensor_parallel_size} does not divide the {sizes.num_heads} query heads;"
            " give a divisor"
        )
    if serving.quantization == "fp8" and options.kv_cache_memory is not None:
        raise CommandError("--quantization: fp8 needs a GPU; use int8 or none, or --gpu-memory")
    longest = serving.max_model_len or sizes.max_positions
    on_cpu = options.kv_cache_memory is not None
    weights = weights_bytes(sizes, serving.quantization, longest, on_cpu=on_cpu)
    step = step_bytes(sizes, serving) if options.step_memory is None else parse_bytes(options.step_memory)
    if options.kv_cache_memory is not None:
        usable, own, step = parse_bytes(options.kv_cache_memory), 0, 0
    elif options.gpu_memory is not None:
        usable = int(parse_bytes(options.gpu_memory) * options.gpu_memory_utilization)
        own = weights_bytes(sizes, serving.quantization, longest, serving.tensor_parallel_size)
    else:
        raise CommandError("--gpu-memory is missing; add for example --gpu-memory 80GB, or --kv-cache-memory on a CPU")
    serving = with_states(
        serving, sizes, usable - own, default_rows=is_default, num_checkpoints=options.state_checkpoints
    )
    memory = fit(usable, sizes, serving, weights=own, step=step)
    bytes_per_block = block_bytes(sizes, serving)
    if sizes.state_bytes and parse_bytes(options.disk_cache_bytes):
        raise CommandError("--disk-cache-bytes: recurrent state is not copied to disk; remove it")
    agent, groups = _agent(options.agents, longest), kv_groups(sizes, serving)
    for_prefixes = parse_bytes(options.host_cache)
    num_host_states = host_states(serving, sizes, usable - own, for_prefixes)
    num_groups = 1 if groups is None else groups.num_groups
    state_bytes = num_host_states * sizes.state_bytes
    host_blocks = count_host_blocks(for_prefixes, state_bytes, bytes_per_block, num_groups)
    # With windows, this is a lower bound, because prefixes keep only their last windows.
    host_tokens = host_blocks // num_groups * serving.block_size
    disk_tokens = parse_bytes(options.disk_cache_bytes) // max(1, bytes_per_block) * serving.block_size
    if disk_tokens and not host_tokens:
        raise CommandError("--disk-cache-bytes: blocks on disk pass through host memory; add --host-cache")
    sessions = None
    if agent is not None:
        with_host = memory.num_blocks + host_blocks
        tiers = (memory.num_blocks, with_host, with_host + disk_tokens // serving.block_size)
        sessions = [num_sessions(blocks, serving, agent, options.shared_prefix, groups) for blocks in tiers]
        if sizes.state_bytes:
            on_device = sessions_with_states(serving)
            # A session that pauses needs only its newest state.
            most = (on_device, on_device + num_host_states, on_device + num_host_states)
            sessions = [min(count, limit) for count, limit in zip(sessions, most, strict=True)]
    rows = [
        concurrency(memory, sizes, serving, context=context, output=options.output, shared_prefix=options.shared_prefix)
        for context in _contexts(options, longest)
    ]
    result = {
        "model": options.params or options.model,
        "weights_bytes": weights,
        "kv_bytes_per_token": kv_bytes(sizes, serving.kv_type),
        "kv_formula": kv_formula(sizes, serving.kv_type),
        "kv_by_kind": kv_by_kind(sizes, serving),
        "bytes_per_block": bytes_per_block,
        "per_card": dataclasses.asdict(memory),
        "host_cache_tokens": host_tokens,
        "host_cache_states": num_host_states,
        "disk_cache_tokens": disk_tokens,
        "max_concurrent": {str(row.context): row.complete for row in rows},
        "lengths": [dataclasses.asdict(row) for row in rows],
    }
    if sessions is not None:
        result["sessions"] = {"device": sessions[0], "with_host": sessions[1], "with_disk": sessions[2]}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(_page(sizes, serving, memory, weights, rows, options, (num_host_states, host_tokens), disk_tokens))
    if sessions is not None and agent is not None:
        print(_sessions_text(agent, sessions, "" if groups is None else "at least "))
        if sizes.state_bytes and sessions[0] == sessions_with_states(serving):
            count = serving.num_checkpoints
            print(f"The {count} checkpoints are the limit: a session uses three. --state-checkpoints changes that.")
        elif groups is not None:
            print("A session keeps the windows before the start, the end of the prompt, and the end of its last turn.")
    return 0


def _check_memory(options: Namespace) -> None:
    """Refuse memory sizes that are not sizes, and two kinds of memory for the KV cache."""
    from shared.config import ConfigError, parse_bytes

    for name in ("gpu_memory", "step_memory", "kv_cache_memory", "host_cache", "disk_cache_bytes"):
        try:
            parse_bytes(getattr(options, name) or "0")
        except ConfigError as error:
            raise CommandError(f"--{name.replace('_', '-')}: {error}") from None
    if options.gpu_memory is not None and options.kv_cache_memory is not None:
        raise CommandError("--kv-cache-memory: is the memory of a CPU worker; remove it, or --gpu-memory")


def _model(options: Namespace) -> "ModelSizes":
    from quire_server.model_sizes import counts_weights_of, elements_of, sizes_from_config, sizes_from_params
    from shared.config import ConfigError
    from shared.model_path import resolve_model
    from worker_svc.model.scheme import read_quantisation

    if options.params is not None:
        return sizes_from_params(options.params)
    path = Path(options.model).expanduser()
    if not path.is_file():
        path = resolve_model(options.model, weights=False) / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError:
        raise CommandError(f"--model: {path} is not JSON; use a config.json") from None
    if not isinstance(config, dict):
        raise CommandError(f"--model: {path} is not a JSON object; use a config.json")
    modelopt = path.parent / "hf_quant_config.json"
    if not config.get("quantization_config") and modelopt.is_file():
        found = json.loads(modelopt.read_text("utf-8")).get("quantization")
        config["quantization_config"] = {"quant_method": "modelopt", **(found or {})}
    with contextlib.suppress(ModuleNotFoundError):  # Front ends lack the library of compressed-tensors.
        read_quantisation(path.parent)  # It refuses checkpoints that a worker refuses.
    try:
        sizes = sizes_from_config(config)
    except ConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = f"{path} has a field with an unexpected value ({error})"
        raise CommandError(f"--model: {reason}; use a config.json that transformers can read") from None
    if counts_weights_of(config):
        return dataclasses.replace(sizes, gguf=_gguf_tensors(path.parent))
    files = sorted(path.parent.glob("model*.safetensors"))
    num_weights = sum(elements_of(config, name, shape) for file in files for name, shape in _tensors(file))
    if not num_weights and not sizes.num_parameters:
        raise CommandError(
            f"--model: the weights of model_type {config.get('model_type')} cannot be counted from config.json alone;"
            " give a folder with model.safetensors, or the sizes with --params"
        )
    return dataclasses.replace(sizes, num_parameters=num_weights or sizes.num_parameters)


def _gguf_tensors(folder: Path) -> "tuple[GgufTensor, ...]":
    """Return the tensors of the GGUF file that a worker would read; none if it reads other files."""
    from quire_server.gguf_header import read_tensor_infos

    files = list(folder.glob("*.gguf"))
    if len(files) != 1 or any(folder.glob("model*.safetensors")):
        return ()
    try:
        return read_tensor_infos(files[0])
    except ValueError as error:
        raise CommandError(f"--model: {files[0]} cannot be read: {error}; download the file again") from None


def _tensors(file: Path) -> list[tuple[str, list[int]]]:
    """Return names and shapes in a safetensors file: eight bytes of length, then a JSON header."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [(name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"]


def _contexts(options: Namespace, longest: int) -> list[int]:
    if options.context is None:
        return [context for context in (2048, 4096, 32768) if not longest or context <= longest] or [longest]
    try:
        return [int(word) for word in options.context.split(",")]
    except ValueError:
        raise CommandError(f"--context: {options.context!r} is not a list of numbers; write 2048,4096") from None


def _agent(text: str | None, longest: int) -> "Agent | None":
    from quire_server.capacity import MAX_TURNS, Agent

    if text is None:
        return None
    try:
        agent = Agent._make(int(word) for word in text.split(","))
    except (ValueError, TypeError):
        agent = Agent(0, 0, 0)
    if min(agent) < 1:
        raise CommandError(f"--agents: {text!r} is not three numbers above 0; write for example 12,4096,512")
    if agent.turns > MAX_TURNS:
        raise CommandError(f"--agents: {agent.turns} turns are too many; use at most {MAX_TURNS}")
    if longest and (tokens := agent.tokens(agent.turns - 1)) > longest:
        raise CommandError(
            f"--agents: the last turn ends with {tokens} tokens, more than the model's {longest} positions;"
            " use fewer turns or tokens"
        )
    return agent


def _sessions_text(agent: "Agent", sessions: list[int], least: str) -> str:
    """Return the numbers of sessions in words: on the device, with host memory, and with disk.

    `least` stands before the number with host memory, because that is a lower bound with windows.
    """
    on_device, with_host, with_disk = sessions
    turns = f"Agents with {agent.turns} turns, from {agent.first_prompt:,} to {agent.tokens(agent.turns - 1):,} tokens"
    host = f", {least}{with_host:,} with host memory" if with_host > on_device else ""
    disk = f", {with_disk:,} with disk" if with_disk > with_host else ""
    return f"\n{turns}: {on_device:,} sessions at a time keep their KV{host}{disk}."


def _layers_of_block(groups: "KVGroups") -> str:
    """Return in words how many layers have their KV in one block."""
    text = f"{groups.num_places} layer{'' if groups.num_places == 1 else 's'}"
    if groups.layers_per_place > 1:
        return f"{text} without a window, or {groups.num_places * groups.layers_per_place} with one"
    if groups.groups_per_layer > 1:
        return f"{text} without a window, or 1/{groups.groups_per_layer} of the tokens of as many with one"
    return text


def _page(
    sizes: "ModelSizes",
    serving: "Serving",
    memory: "Memory",
    weights: int,
    rows: "list[Concurrency]",
    options: Namespace,
    on_host: tuple[int, int],
    disk_tokens: int,
) -> str:
    """Return the result in plain words; `on_host` has the numbers of recurrent states and of tokens there."""
    from quire_server.capacity import kv_bytes, kv_formula, kv_groups

    per_token = kv_bytes(sizes, serving.kv_type)
    cards = serving.tensor_parallel_size
    lines = [f"KV per token   {size_text(per_token)} = {kv_formula(sizes, serving.kv_type)}"]
    groups = kv_groups(sizes, serving)
    if groups is not None:
        num_windowed = sum(group > 0 for group in groups.groups)
        lines.append(
            f"Windows        {num_windowed} of {sizes.num_layers} layers keep the newest {groups.window:,} tokens and a"
            f" step; a block holds {_layers_of_block(groups)}"
        )
    else:
        freeing = dataclasses.replace(serving, frees_windows=True)
        reason = ""
        if kv_groups(sizes, dataclasses.replace(freeing, kv_type="bfloat16")):
            if options.kv_cache_memory is None:
                reason = "on a GPU"
            elif not kv_groups(sizes, freeing):
                reason = f"with --kv-cache-dtype {serving.kv_type}"
            else:
                reason = "with --disk-cache-bytes" if disk_tokens else "with a draft model"
        if reason:
            lines.append(f"Windows        not freed {reason}; all layers keep all tokens")
    if sizes.state_bytes:
        num_rows = f"{serving.max_rows} row{'' if serving.max_rows == 1 else 's'}"
        twice = " x 2" if serving.states_per_row == 2 else ""
        each = f"({num_rows}{twice} + {serving.num_checkpoints} checkpoints) x {sizes.state_bytes:,} bytes"
        lines.append(f"State          {size_text(memory.state)} = {each}")
    if sizes.num_heads > sizes.num_kv_heads and not sizes.rotary_dim:
        factor = sizes.num_heads / sizes.num_kv_heads
        lines.append(
            f"               The {sizes.num_heads} query heads do not count: with them it would be {factor:g} times as"
            " much."
        )
    if options.kv_cache_memory is None:
        where = f"Each of {cards} cards" if cards > 1 else "The card"
        lines += [
            f"Weights        {size_text(memory.weights)}",
            f"Step           {size_text(memory.step)} estimated for activations; a worker measures it at its start",
            f"KV cache       {size_text(memory.kv)} remain of {options.gpu_memory} x"
            f" {options.gpu_memory_utilization:g}",
            "",
            f"{where} holds {memory.num_blocks:,} blocks of {serving.block_size} tokens:"
            f" {memory.num_blocks * serving.block_size:,} tokens.",
        ]
    else:
        tokens = memory.num_blocks * serving.block_size
        lines += [f"Weights        {size_text(weights)} besides the KV cache"]
        held = f"{tokens:,} tokens" if groups is None else f"for {groups.num_groups} block tables per request"
        lines += [f"KV cache       {memory.num_blocks:,} blocks of {serving.block_size} tokens: {held}"]
    num_host_states, host_tokens = on_host
    if host_tokens:
        num_groups, least = (1, "") if groups is None else (groups.num_groups, "at least ")
        factor = 1 + host_tokens / max(1, memory.num_blocks // num_groups * serving.block_size)
        lines.append(
            f"Host memory of {options.host_cache} holds cached prefixes of {least}{host_tokens:,} tokens more: together"
            f" {factor:.1f} times as many as the KV cache."
        )
        if num_host_states:
            lines.append(
                f"It also holds {num_host_states:,} recurrent states, of these prefixes and preempted requests."
            )
    if options.speculation == "draft":
        lines.append("The weights and the KV of the draft model are not counted.")
    if disk_tokens:
        lines.append(f"A disk cache of {options.disk_cache_bytes} holds cached prefixes of {disk_tokens:,} tokens.")
    shared = options.shared_prefix // serving.block_size * serving.block_size
    if shared:
        lines.append(f"All requests share the blocks of their first {shared:,} tokens.")
    table = "{:>9} {:>14} {:>16} {:>18} {:>20}".format
    lines += [
        "",
        table("", "KV of one", "requests at", "requests with", "requests if each"),
        table("context", "request", "full length", "half their output", "reserves the longest"),
    ]
    lines += [
        table(
            f"{row.context:,}",
            size_text(row.kv_bytes_per_request),
            f"{row.complete:,}",
            f"{row.average:,}",
            f"{row.reserved:,}" if row.reserved or sizes.max_positions else "-",
        )
        for row in rows
    ]
    if max(row.average for row in rows) > serving.max_rows:
        lines += ["", f"A worker runs at most {serving.max_rows} requests at once; --max-num-seqs changes that."]
    if cards > 1:
        lines += [
            "",
            "Numbers for several cards are computed: tensor parallelism has not been run on several GPUs yet.",
        ]
    return "\n".join(lines)


def size_text(size: int) -> str:
    """Return bytes in decimal and binary units, such as "1.34 GB (1.25 GiB)"."""
    for exponent, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**exponent:
            binary = unit[0].upper() + "iB"
            return f"{size / 1000**exponent:.2f} {unit} ({size / 1024**exponent:.2f} {binary})"
    return f"{size} bytes"
