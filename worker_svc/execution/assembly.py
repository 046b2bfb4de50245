"""Builds the engine for a loaded model: the worker's limits and its KV cache size."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from opentelemetry.trace import Tracer

from shared.config import ConfigError, WorkerConfig, parse_bytes
from shared.frames import MAX_STEP_TOKENS
from shared.grammars import GrammarError, GrammarTokenizer
from shared.kv_sizes import count_blocks, count_disk_blocks, count_host_blocks, default_checkpoints, default_host_states
from shared.logging import get_logger
from shared.model_path import draft_of
from worker_svc.device.accelerator import Accelerator
from worker_svc.execution.decode_graphs import buckets
from worker_svc.execution.engine import Engine
from worker_svc.execution.profiling import run_captured_step, run_largest_step
from worker_svc.execution.step_sizes import default_rows, default_tokens, gpu_of, largest_captured
from worker_svc.interface.limits import Limits
from worker_svc.memory.kv_groups import WINDOW_CHUNK, KVGroups, divide
from worker_svc.memory.kv_pool import allocate, block_bytes, cuda_memory_for_kv, layer_bytes
from worker_svc.model.base import KVCache, Model
from worker_svc.model.loader import ModelDescription
from worker_svc.model.recurrent import StateCounts
from worker_svc.model.step_graphs import Shape, StepGraphs, captured, chunk_shapes, draft_shapes, pass_shapes
from worker_svc.outputs.grammars import GrammarStore
from worker_svc.ranks.group import Group
from worker_svc.rows.table import RowTable
from worker_svc.speculation.draft_model import DraftModelProposer, load_draft_model
from worker_svc.speculation.drafts import GroupProposer, Proposer
from worker_svc.speculation.ngram import NgramProposer


def build_engine(
    config: WorkerConfig,
    model: Model,
    description: ModelDescription,
    device: torch.device,
    tracer: Tracer,
    accelerator: Accelerator | None,
    group: Group | None = None,
) -> Engine:
    """Build the engine that serves `model` within the memory that `config` allows.

    Args:
        config: the worker's configuration.
        model: the loaded model.
        description: the sizes and types of `model`.
        device: the device of `model`.
        tracer: creates the spans of steps and rows.
        accelerator: the result of `make_accelerator` for `device`.
        group: the ranks that share the model, all of which build their engines now; None if this process has the whole
            model.

    Raises:
        ConfigError: a size is invalid, or the memory does not hold a single block.
    """
    gpu = gpu_of(device)
    group = group or Group()
    num_layers = len(model.kv_shapes)
    num_weights = description.weights_per_layer * num_layers // group.size
    # A step includes every running request, so a small token limit also lowers the default number of rows.
    max_rows = config.max_num_seqs or min(default_rows(gpu), config.max_num_batched_tokens or MAX_STEP_TOKENS)
    num_checkpoints = num_host_states = 0
    if model.state_bytes:
        _check_recurrent(config)
        max_rows, num_checkpoints, num_host_states = _count_states(config, model, description, max_rows, device)
        rolls_back = _states_per_row(config) > 1
        model.allocate_states(StateCounts(max_rows, num_checkpoints, num_host_states, rolls_back))
    max_tokens = config.max_num_batched_tokens or default_tokens(gpu, num_weights, max_rows)
    limits = Limits(
        max_rows=max_rows,
        max_tokens_per_step=max_tokens,
        max_model_len=description.max_model_len,
        block_size=config.block_size,
        num_blocks=0,
        vocab_size=description.vocab_size,
        hidden_size=model.hidden_size,
        max_draft_tokens=0 if config.speculation == "off" else config.speculative_tokens,
        state_bytes=model.state_bytes,
        num_checkpoints=num_checkpoints,
        num_host_states=num_host_states,
    )
    draft_model = _load_draft_model(config, description, device, group)
    kv_shapes = model.kv_shapes + (() if draft_model is None else draft_model.kv_shapes)
    graphs = _Graphs()
    if config.cuda_graphs and accelerator is not None:
        most = min(config.cuda_graph_tokens or largest_captured(gpu, num_weights, num_layers), max_tokens)
        graphs = _graphs(limits, most, model, draft_model)
    setting = "kv_cache_memory" if device.type == "cpu" else "gpu_memory_utilization"
    memory = _memory_for_kv(config, model, limits, description.kv_dtype, device, graphs)
    (shared_memory,) = group.least((memory,))
    kv_groups = _kv_groups(
        config,
        model,
        limits,
        accelerator,
        shared_memory,
        description.kv_dtype,
        has_drafter=draft_model is not None,
    )
    num_others = 0
    if kv_groups is not None:
        get_logger().info(
            "KV behind sliding windows is freed",
            window=kv_groups.window,
            kv_groups=kv_groups.num_groups,
            places_per_block=kv_groups.num_places,
            layers_per_place=kv_groups.layers_per_place,
        )
        kv_shapes = (model.kv_shapes[kv_groups.groups.index(0)],) * kv_groups.num_places
        limits = dataclasses.replace(
            limits, num_kv_groups=kv_groups.num_groups, window=kv_groups.window, window_chunk=WINDOW_CHUNK
        )
        num_others = (kv_groups.num_groups - 1) * limits.max_blocks_per_row
    bytes_per_block = block_bytes(kv_shapes, limits.block_size, description.kv_dtype)
    # Blocks without keys and values take no memory, so there are enough to find every checkpoint.
    num_sequences = limits.max_rows + (0 if bytes_per_block else limits.num_checkpoints)
    num_blocks = count_blocks(
        memory, bytes_per_block, num_sequences * (limits.max_blocks_per_row + num_others), setting
    )
    if bytes_per_block and num_blocks < memory // bytes_per_block:
        get_logger().info(
            "KV cache smaller than its memory allows: more blocks than all rows at full length can use are not needed",
            setting=setting,
            allowed_bytes=memory,
            used_bytes=num_blocks * bytes_per_block,
            rows=limits.max_rows,
            max_model_len=limits.max_model_len,
        )
    num_host_blocks = num_host_states * limits.max_blocks_per_row
    if bytes_per_block:
        states = num_host_states * limits.state_bytes
        num_host_blocks = count_host_blocks(
            parse_bytes(config.host_cache), states, bytes_per_block, limits.num_kv_groups
        )
    num_blocks, num_host_blocks = group.least((num_blocks, num_host_blocks))
    limits = dataclasses.replace(
        limits,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_disk_blocks=_count_disk_blocks(config, num_host_blocks, bytes_per_block, group),
        block_bytes=bytes_per_block,
        cache_kinds=_cache_kinds(model, kv_groups),
    )
    caches = allocate(kv_shapes, num_blocks, limits.block_size, description.kv_dtype, device, setting)
    return Engine(
        model,
        caches,
        limits,
        device,
        tracer,
        grammars=make_grammar_store(description, limits.max_rows) if group.rank == 0 else None,
        accelerator=accelerator,
        decode_sizes=graphs.decode,
        step_shapes=graphs.steps,
        make_proposer=_make_proposer(config.speculation, draft_model, device, group, accelerator, graphs.draft_model),
        group=group,
        worker_id=config.worker_id,
        kv_groups=kv_groups,
    )


def _cache_kinds(model: Model, kv_groups: KVGroups | None) -> tuple[str, ...]:
    """Return the kinds of cache that the layers store. With one group, windows are stored as whole contexts."""
    kinds = []
    if model.kv_shapes and (kv_groups is None or 0 in kv_groups.groups):
        kinds.append("latent" if any(shape.is_latent for shape in model.kv_shapes) else "full")
    if kv_groups is not None:
        kinds.append("window")
    if model.state_bytes:
        kinds.append("state")
    return tuple(kinds)


def _kv_groups(
    config: WorkerConfig,
    model: Model,
    limits: Limits,
    accelerator: Accelerator | None,
    memory: int,
    kv_dtype: torch.dtype,
    *,
    has_drafter: bool,
) -> KVGroups | None:
    """Return the groups of layers, or None for one group. Log why a model with windows has one group.

    Blocks of several groups are not written to disk. They have no room for the KV of a draft model, whose layers have
    other sizes. Graphs have the tables of one group. If layers differ in size, the scales of a quantised cache may
    prevent that one size is a multiple of the other.

    Args:
        config: the worker's configuration.
        model: the loaded model.
        limits: the worker's limits.
        accelerator: the accelerator of `build_engine`.
        memory: bytes for KV.
        kv_dtype: type of the KV cache, as in `kernels.kv_quantised`.
        has_drafter: whether the worker has a draft model.
    """
    if model.state_bytes:
        return None

    def divided(dtype: torch.dtype) -> KVGroups | str:
        return divide(
            layer_bytes(model.kv_shapes, dtype),
            model.windows,
            max_model_len=limits.max_model_len,
            chunk=WINDOW_CHUNK,
            block_size=limits.block_size,
            memory=memory,
        )

    groups = divided(kv_dtype)
    preventing = {
        "disk_cache": bool(config.disk_cache),
        "draft_model": has_drafter,
        "cuda_graphs": config.cuda_graphs and accelerator is not None,
    }
    settings = " and ".join(name for name, is_used in preventing.items() if is_used)
    if isinstance(groups, str):
        reason = groups and f"{groups}; see with quire capacity how many requests fit"
        if not isinstance(divided(torch.bfloat16), str):
            reason = f"not supported with kv_cache_dtype {config.kv_cache_dtype}; to free it, use auto"
    else:
        reason = settings and f"not supported with {settings}; to free it, turn off {settings}"
    if reason:
        get_logger().info(
            f"KV behind sliding windows is kept: {reason}. A request holds the KV of all its tokens in all layers"
        )
    return None if reason or isinstance(groups, str) else groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graphs:
    """The graphs to capture."""

    decode: tuple[int, ...] = ()
    """Row counts of decode steps."""
    steps: tuple[Shape, ...] = ()
    """Shapes of steps with chunks or drafts."""
    draft_model: tuple[Shape, ...] = ()
    """Shapes of the draft model's passes."""

    @property
    def count(self) -> int:
        """Number of graphs."""
        return len(self.decode) + len(self.steps) + len(self.draft_model)


def _graphs(limits: Limits, most: int, model: Model, draft_model: Model | None) -> _Graphs:
    """Return the graphs for steps of up to `most` tokens."""
    for_drafts = draft_shapes(most, limits)
    return _Graphs(
        decode=buckets(limits.max_rows),
        steps=chunk_shapes(most, limits.max_rows) + for_drafts if model.capturable else (),
        draft_model=pass_shapes(for_drafts) if draft_model is not None and draft_model.capturable else (),
    )


def _count_disk_blocks(config: WorkerConfig, num_host_blocks: int, bytes_per_block: int, group: Group) -> int:
    """Return the number of blocks that fit into the disk cache; 0 without one.

    Raises:
        ConfigError: there is no host memory for blocks on their way from disk, or the worker has several ranks.
    """
    if not config.disk_cache:
        return 0
    if not num_host_blocks:
        raise ConfigError(
            "disk_cache: blocks pass through host memory, but host_cache holds no block; raise host_cache"
        )
    if group.size > 1:
        raise ConfigError("disk_cache: not supported with tensor_parallel_size above 1; remove disk_cache")
    num_blocks = count_disk_blocks(parse_bytes(config.disk_cache_bytes), bytes_per_block)
    if not num_blocks:
        raise ConfigError(f"disk_cache_bytes: {config.disk_cache_bytes} is too little for one block; raise it")
    return num_blocks


def _check_recurrent(config: WorkerConfig) -> None:
    """Check that the settings do not need to copy a state to disk.

    Raises:
        ConfigError: they do.
    """
    if config.disk_cache:
        raise ConfigError(
            "disk_cache: recurrent state is not copied to disk, so this model does not support a disk cache; remove it"
        )


def _count_states(
    config: WorkerConfig, model: Model, description: ModelDescription, max_rows: int, device: torch.device
) -> tuple[int, int, int]:
    """Return the numbers of rows whose recurrent states fit into memory, of checkpoints, and of states on the host.

    The default number of rows is reduced until their states take at most half of the memory for KV.

    Raises:
        ConfigError: the states of the configured rows and checkpoints do not fit.
    """
    if device.type == "cpu":
        setting, memory = "kv_cache_memory", parse_bytes(config.kv_cache_memory)
    else:
        setting = "gpu_memory_utilization"
        installed = torch.cuda.mem_get_info(device)[1]
        memory = int(installed * config.gpu_memory_utilization) - torch.cuda.memory_allocated(device)
    total = memory
    share = memory if config.max_num_seqs or not model.kv_shapes else memory // 2
    state_bytes = model.state_bytes * _states_per_row(config)
    fitting, least = share // state_bytes, config.max_num_seqs or 1
    if fitting < least:
        raise ConfigError(
            f"{setting}: the recurrent state of {_rows(least)} takes {least * state_bytes:,} bytes, but there are"
            f" {share:,} for it; raise it{', or lower max_num_seqs' if config.max_num_seqs else ''}"
        )
    rows = min(max_rows, fitting)
    left = memory - rows * state_bytes
    checkpoints = config.state_checkpoints
    if checkpoints < 0:
        memory -= rows * (state_bytes - model.state_bytes)
        checkpoints = default_checkpoints(rows, model.state_bytes, memory, has_kv=bool(model.kv_shapes))
    elif checkpoints * model.state_bytes > left:
        raise ConfigError(
            f"state_checkpoints: {checkpoints} take {checkpoints * model.state_bytes:,} bytes, but"
            f" {setting} leaves {max(0, left):,} beside the states of {_rows(rows)}; lower one of them"
        )
    row_blocks = -(-description.max_model_len // config.block_size)
    row_bytes = row_blocks * block_bytes(model.kv_shapes, config.block_size, description.kv_dtype)
    used = min(total, rows * (state_bytes + row_bytes) + checkpoints * model.state_bytes)
    host_states = _count_host_states(config, model, rows, checkpoints, used)
    get_logger().info(
        "rows have recurrent state",
        state_bytes=model.state_bytes,
        rows=rows,
        checkpoints=checkpoints,
        host_states=host_states,
        setting=setting,
    )
    return rows, checkpoints, host_states


def _states_per_row(config: WorkerConfig) -> int:
    """Return the number of a row's states: its own, and with drafts the one before the step."""
    return 1 if config.speculation == "off" else 2


def _count_host_states(config: WorkerConfig, model: Model, rows: int, checkpoints: int, memory: int) -> int:
    """Return the number of states in host memory; see `default_host_states`.

    Args:
        config: the worker's configuration.
        model: the model.
        rows: number of rows.
        checkpoints: number of checkpoints.
        memory: bytes that the device uses for states and KV.

    Raises:
        ConfigError: there is host memory, but too little for one state.
    """
    host_memory, has_kv = parse_bytes(config.host_cache), bool(model.kv_shapes)
    number = default_host_states(
        rows, checkpoints, model.state_bytes, memory=memory, host_memory=host_memory, has_kv=has_kv
    )
    if host_memory and not number:
        share = host_memory // 4 if has_kv else host_memory
        raise ConfigError(
            f"host_cache: {config.host_cache} has {share:,} bytes for recurrent state, but that of one row takes"
            f" {model.state_bytes:,}; raise it, or use 0"
        )
    return number


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


def _load_draft_model(
    config: WorkerConfig, description: ModelDescription, device: torch.device, group: Group
) -> Model | None:
    """Load the draft model if the configuration requires one; with several ranks, only rank 0 has it.

    Raises:
        ConfigError: the settings contradict each other, or the draft model does not fit.
    """
    if config.speculation != "draft":
        if config.draft_model:
            raise ConfigError("draft_model: speculation is not draft; set speculation to draft, or remove draft_model")
        return None
    draft_model = config.draft_model or draft_of(config.model)
    if not draft_model:
        raise ConfigError(
            "draft_model: missing; set it to a smaller model with the same tokenizer (only 'demo' has one of its own)"
        )
    if group.rank > 0:
        return None
    return load_draft_model(dataclasses.replace(config, draft_model=draft_model), description, device)


def _make_proposer(
    speculation: str,
    draft_model: Model | None,
    device: torch.device,
    group: Group,
    accelerator: Accelerator | None,
    shapes: tuple[Shape, ...],
) -> Callable[[RowTable, Sequence[KVCache]], Proposer] | None:
    if speculation != "draft":
        return NgramProposer if speculation == "ngram" else None

    def make(table: RowTable, caches: Sequence[KVCache]) -> Proposer:
        if draft_model is None:
            return GroupProposer(group, None)
        graphs = None
        if accelerator is not None and shapes:
            graphs = StepGraphs(accelerator.capture, device, table.limits, draft_model, caches, shapes)
            if not captured("passes of the draft model", graphs.capture):
                graphs = None
        proposer = DraftModelProposer(table, draft_model, caches, device, graphs)
        return GroupProposer(group, proposer) if group.size > 1 else proposer

    return make


def make_grammar_store(description: ModelDescription, max_rows: int) -> GrammarStore | None:
    """Return a model's grammar store; None if its tokenizer does not support grammars.

    Reads the tokenizer now, before the first step.
    """
    path = description.folder / "tokenizer.json"
    try:
        tokenizer = GrammarTokenizer(path, description.vocab_size, description.eos_token_ids)
    except GrammarError as error:
        get_logger().info("grammars not supported by this worker", reason=str(error))
        return None
    return GrammarStore(tokenizer, description.eos_token_ids, max_rows)


def _memory_for_kv(
    config: WorkerConfig,
    model: Model,
    limits: Limits,
    dtype: torch.dtype,
    device: torch.device,
    graphs: _Graphs,
) -> int:
    """Return the bytes for KV if these graphs are captured."""
    if device.type == "cpu":
        num_states = limits.max_rows * _states_per_row(config) + limits.num_checkpoints
        return parse_bytes(config.kv_cache_memory) - num_states * limits.state_bytes
    num_tokens = max((1, *graphs.decode, *(shape.num_tokens for shape in graphs.steps)))
    num_logits = max((1, *graphs.decode, *(shape.num_logits for shape in graphs.steps)))
    largest = dataclasses.replace(limits, max_tokens_per_step=num_tokens)
    return cuda_memory_for_kv(
        device,
        config.gpu_memory_utilization,
        lambda: run_largest_step(model, limits, dtype, device),
        (lambda: run_captured_step(model, largest, num_logits, dtype, device)) if graphs.count else None,
        graphs.count,
    )
