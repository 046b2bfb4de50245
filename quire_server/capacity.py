"""Capacity: memory for a model's weights and KV, and the number of requests that a card holds.

The module only computes with numbers and reads no file. KV sizes come from `shared.kv_sizes`, as in a worker, and those
of the model from `model_sizes`.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire_server.gguf_header import GgufTensor
from quire_server.model_sizes import INT4_GROUP, ModelSizes
from shared.config import ConfigError
from shared.kv_sizes import KV_TYPES, count_blocks, default_checkpoints, default_host_states, kv_bytes_of_layer
from worker_svc.interface.limits import Limits
from worker_svc.memory.kv_groups import WINDOW_CHUNK, KVGroups, divide

_GGUF_LAYOUTS = {
    "Q4_0": (64, 36),
    "Q5_0": (64, 68),
    "Q8_0": (64, 68),
    "Q4_K": (256, 37),
    "Q5_K": (256, 45),
    "Q6_K": (256, 53),
}
"""Inputs of a packed block and eighths of a bit per weight, by the type (`kernels.gguf`)."""
_GGUF_BITS_ON_GPU = {"Q4_0": 4.5, "Q5_0": 8.5, "Q8_0": 8.5, "Q4_K": 6, "Q5_K": 10, "Q6_K": 10}
"""Bits per weight with scales and offsets (`worker_svc.model.weight_only`)."""
_RULES_BYTES = 33
"""Bytes per vocabulary token in a row with rules: the row's state, and temporary tensors for penalties."""
_UNKNOWN_STEP = 1 << 30
"""Bytes assumed for a step's activations if the sizes for an estimate are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Worker settings that affect memory."""

    kv_type: str
    """One of `shared.kv_sizes.KV_TYPES`."""
    quantization: str = "none"
    """Type of the weights: none, int8, int4 or fp8."""
    block_size: int = 16
    max_model_len: int = 0
    """Longest sequence in tokens; 0 for the model's positions."""
    max_rows: int = 256
    num_checkpoints: int = 0
    """Checkpoints of recurrent states."""
    max_tokens_per_step: int = 8192
    tensor_parallel_size: int = 1
    frees_windows: bool = False
    """Whether the worker frees KV behind windows: on a CPU, without a disk cache and a draft model."""
    kv_cache_memory: int = 0
    """Bytes for KV on a CPU, which limit the number of KV groups."""
    states_per_row: int = 1
    """Recurrent states of a row: with drafts, a second one for the copy before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How the memory of one card is used, in bytes."""

    weights: int
    step: int
    state: int
    """Recurrent states of all rows and checkpoints."""
    kv: int
    num_blocks: int
    """Number of KV blocks. With tensor parallelism, a block holds one card's share of the heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """Number of requests with one given length that fit into memory."""

    context: int
    """Tokens of a request, prompt and output."""
    blocks_per_request: int
    """Number of blocks per complete request, excluding the blocks of the shared prefix."""
    kv_bytes_per_request: int
    """Bytes of these blocks on all cards."""
    complete: int
    """Number of requests that fit at full length; `guaranteed_no_evict` admits this number if no prefix is shared."""
    average: int
    """Requests that fit when each has generated half of its output: the mean under `max_utilization`."""
    reserved: int
    """Requests that fit without paging, when each reserves the maximum length; 0 if the maximum length is unknown."""


def kv_groups(sizes: ModelSizes, serving: Serving) -> KVGroups | None:
    """Return the groups of layers on a worker that frees KV behind windows; None on others."""
    if not (serving.frees_windows and sizes.windows):
        return None
    groups = divide(
        _layer_bytes(sizes, serving.kv_type),
        sizes.windows,
        max_model_len=serving.max_model_len or sizes.max_positions or 1 << 30,
        chunk=WINDOW_CHUNK,
        block_size=serving.block_size,
        memory=serving.kv_cache_memory,
    )
    return None if isinstance(groups, str) else groups


def kv_by_kind(sizes: ModelSizes, serving: Serving) -> dict[str, dict[str, int]]:
    """Return what a request stores, by kind of cache: `full`, `window`, `latent` and `state`.

    A kind has its number of layers, the bytes per token on all cards, and for windows the number of tokens. The state
    has its bytes.
    """
    groups = kv_groups(sizes, serving)
    group_of = (0,) * sizes.num_layers if groups is None else groups.groups
    of_layers = list(zip(group_of, map(sum, _layer_bytes(sizes, serving.kv_type)), strict=True))
    full, windowed = [size for group, size in of_layers if not group], [size for group, size in of_layers if group]

    def layers(of_kind: list[int]) -> dict[str, int]:
        return {"layers": len(of_kind), "bytes_per_token": sum(of_kind)}

    kinds = {"latent" if sizes.rotary_dim else "full": layers(full)} if full else {}
    if groups is not None:
        kinds["window"] = layers(windowed) | {"tokens": groups.window}
    if sizes.state_bytes:
        kinds["state"] = {"bytes": sizes.state_bytes}
    return kinds


def block_bytes(sizes: ModelSizes, serving: Serving) -> int:
    """Return the bytes of a block on one card: of all layers, or of one group."""
    groups = kv_groups(sizes, serving)
    of_layers = _layer_bytes(sizes, serving.kv_type, serving.tensor_parallel_size)
    if groups is None:
        return serving.block_size * sum(map(sum, of_layers))
    return serving.block_size * groups.num_places * sum(of_layers[groups.groups.index(0)])


def kv_bytes(sizes: ModelSizes, kv_type: str, tensor_parallel_size: int = 1) -> int:
    """Return the size in bytes of one token's KV on one card."""
    return sum(map(sum, _layer_bytes(sizes, kv_type, tensor_parallel_size)))


def _layer_bytes(sizes: ModelSizes, kv_type: str, tensor_parallel_size: int = 1) -> list[tuple[int, int]]:
    """Return the bytes of one token's keys and of its values in each layer on one card."""
    if sizes.kv_sizes:
        return [kv_bytes_of_layer(heads, (width, width), kv_type) for heads, width in sizes.kv_sizes]
    heads = _kv_heads_per_card(sizes, tensor_parallel_size)
    widths = (sizes.head_dim, sizes.rotary_dim or sizes.head_dim)
    return [kv_bytes_of_layer(heads, widths, kv_type)] * sizes.num_layers


def _kv_heads_per_card(sizes: ModelSizes, cards: int) -> int:
    """Return the KV heads that a card holds, as `worker_svc.ranks.shard` divides them."""
    if not sizes.num_heads or sizes.num_kv_heads % cards == 0:
        return -(-sizes.num_kv_heads // cards)
    own = max(1, sizes.num_heads // cards)
    return own // math.gcd(sizes.num_heads // sizes.num_kv_heads, own)


def kv_formula(sizes: ModelSizes, kv_type: str) -> str:
    """Return the formula for one token's KV size, as text with this model's numbers."""
    chosen = KV_TYPES[kv_type]
    if sizes.rotary_dim:
        widths = (sizes.head_dim, sizes.rotary_dim)
        scales = sum(map(chosen.vector_bytes, widths)) - sum(widths) * chosen.bits // 8
        per_layer = f"({sizes.head_dim} latent + {sizes.rotary_dim} rotary elements) x {_element(kv_type)}"
        per_layer = f"({per_layer} + {scales} bytes of scales)" if scales else per_layer
        return f"{sizes.num_layers} layers x {per_layer}"
    layers = Counter(sizes.kv_sizes) or {(sizes.num_kv_heads, sizes.head_dim): sizes.num_layers}
    return " + ".join(_formula_of_layers(count, *of_layer, kv_type) for of_layer, count in layers.items())


def _formula_of_layers(num_layers: int, num_kv_heads: int, head_dim: int, kv_type: str) -> str:
    chosen = KV_TYPES[kv_type]
    per_head = f"{head_dim} head_dim x {_element(kv_type)}"
    if chosen.group:
        count = head_dim // chosen.group
        groups = f"{count} group{'s' if count > 1 else ''}"
        per_head = f"({per_head} + {groups} x {chosen.scale_bytes} bytes of scale and zero)"
    elif chosen.scale_bytes:
        per_head = f"({per_head} + {chosen.scale_bytes} bytes of scale)"
    return f"2 (key and value) x {num_layers} layers x {num_kv_heads} KV heads x {per_head}"


def _element(kv_type: str) -> str:
    """Return the size of an element, as text."""
    bits = KV_TYPES[kv_type].bits
    return "1/2 byte" if bits == 4 else f"{bits // 8} byte{'s' if bits > 8 else ''}"


def weights_bytes(
    sizes: ModelSizes, quantization: str, num_positions: int, tensor_parallel_size: int = 1, *, on_cpu: bool = False
) -> int:
    """Return the size in bytes of the weights on one card, including the tables for the rotary embedding.

    Cards that share a model each have a copy of its norms, routers and tables. If there are more cards than KV heads,
    KV heads are also duplicated.

    Args:
        sizes: the model.
        quantization: "none", "int8", "int4" or, on a GPU, "fp8". Norms and an embedding apart from the head keep the
            model's type; with int4 the head has int8.
        num_positions: maximum sequence length, which determines the size of the tables.
        tensor_parallel_size: number of cards that share the model.
        on_cpu: whether the CPU kernels hold the weights; False for a GPU. Without `quantization`, both keep the codes
            of a quantised checkpoint where they have a form for them.

    Raises:
        ConfigError: sizes are missing.
    """
    element = KV_TYPES[sizes.dtype].bits // 8
    if quantization == "none" and sizes.gguf and tensor_parallel_size == 1:
        of_tensor = _gguf_bytes if on_cpu else _gguf_bytes_on_gpu
        return sum(of_tensor(tensor, element) for tensor in sizes.gguf) + num_positions * sizes.head_dim * 4
    of_layers = sizes.stored if on_cpu and quantization == "none" else quantization
    on_gpu = sizes.stored_on_gpu if not on_cpu and quantization == "none" else 0.0
    of_layers = "codes" if on_gpu else of_layers
    if sizes.num_parameters:
        per_weight = {"none": float(element), "int8": 1.0, "int4": 4.5 / 8, "fp8": 1.0}[quantization]
        absorbed = sizes.num_absorbed * element if on_cpu else 0
        return -int(-sizes.num_parameters * per_weight // tensor_parallel_size) + absorbed
    if not (sizes.num_heads and sizes.hidden_size and sizes.intermediate_size and sizes.vocab_size):
        raise ConfigError(
            "--params: the weights are not known; add parameters=NUMBER, or hidden, heads, intermediate and vocab"
        )
    cards = tensor_parallel_size
    hidden, inner = sizes.hidden_size, sizes.intermediate_size // cards
    query, kv = sizes.num_heads // cards * sizes.head_dim, _kv_heads_per_card(sizes, cards) * sizes.head_dim
    vocab = -(-sizes.vocab_size // cards)

    def product(outputs: int, inputs: int, kind: str) -> int:
        if kind == "none":
            return outputs * inputs * element
        if kind == "codes":
            return int(outputs * inputs * on_gpu / 8)
        if kind == "fp8":
            return outputs * (inputs + 4)
        rows = -(-outputs // 16) * 16
        if kind == "int8":
            return rows * (-(-inputs // 4) * 4 + 8)  # Each output has a scale and a sum.
        # 64 weights of 4 bits, plus a scale and a zero point of 2 bytes each
        return rows * -(-inputs // INT4_GROUP) * 36

    # On a CPU, `transformers` computes gpt-oss, and its experts are not quantised.
    of_experts = "none" if sizes.biases and on_cpu else of_layers
    of_layers = "none" if of_layers == "codes" and sizes.only_experts_stored else of_layers
    experts = sizes.num_experts * (product(2 * inner, hidden, of_experts) + product(hidden, inner, of_experts))
    if sizes.num_experts > 1:
        experts += sizes.num_experts * hidden * element
    shared = sizes.shared_intermediate_size // cards
    experts += product(2 * shared, hidden, of_layers) + product(hidden, shared, of_layers) if shared else 0
    layer = product(query + 2 * kv, hidden, of_layers) + product(hidden, query, of_layers)
    layer += experts + 2 * hidden * element
    if sizes.biases:
        of_one_expert = 2 * inner + hidden + 1
        layer += (query + 2 * kv + hidden + sizes.num_experts * of_one_expert) * element
        layer += sizes.num_heads // cards * 4  # sinks
    # The rows of a tied LM head are the embedding, which a GPU does not quantise.
    of_head = "int8" if quantization == "int4" else quantization
    head = product(vocab, hidden, "none" if sizes.tied and not on_cpu else of_head)
    embedding = 0 if sizes.tied else vocab * hidden * element
    tables = num_positions * sizes.head_dim * 4
    return sizes.num_layers * layer + head + embedding + hidden * element + tables


def _gguf_bytes(tensor: GgufTensor, element: int) -> int:
    """Return the bytes of a tensor of a GGUF file on the CPU kernels; `element`: bytes of a dequantised weight."""
    inputs, eighths = _GGUF_LAYOUTS.get(tensor.kind, (0, 0))
    if not inputs or len(tensor.shape) != 2:
        return math.prod(tensor.shape) * element
    outputs, width = tensor.shape
    return -(-outputs // 16) * 16 * -(-width // inputs) * inputs * eighths // 64


def _gguf_bytes_on_gpu(tensor: GgufTensor, element: int) -> int:
    """Return the bytes of a tensor of a GGUF file on a GPU, where the embedding is dequantised."""
    bits = _GGUF_BITS_ON_GPU.get(tensor.kind)
    if bits is None or len(tensor.shape) != 2 or tensor.shape[1] % 64 or tensor.name == "token_embd.weight":
        return math.prod(tensor.shape) * element
    return int(math.prod(tensor.shape) * bits / 8)


def step_bytes(sizes: ModelSizes, serving: Serving) -> int:
    """Estimate the bytes of the largest step's activations, logits and sampling on one card.

    A GPU worker measures this memory at start, with logits for all tokens (as for prompt log-probabilities) and with
    rules in all rows. Activations are released before sampling.
    """
    if not (sizes.hidden_size and sizes.intermediate_size and sizes.vocab_size):
        return _UNKNOWN_STEP
    element = KV_TYPES[sizes.dtype].bits // 8
    inner = 3 * sizes.intermediate_size // serving.tensor_parallel_size
    activations = serving.max_tokens_per_step * (inner + 4 * sizes.hidden_size) * element
    logits = serving.max_tokens_per_step * sizes.vocab_size * element
    return max(activations, logits + serving.max_rows * sizes.vocab_size * (element + _RULES_BYTES))


def with_states(
    serving: Serving, sizes: ModelSizes, memory: int, *, default_rows: bool, num_checkpoints: int = -1
) -> Serving:
    """Return `serving` with the recurrent states that a worker allocates.

    Args:
        serving: worker settings.
        sizes: the model.
        memory: bytes that states and KV may use.
        default_rows: whether the number of rows is the default, which is reduced until states take half of the memory.
        num_checkpoints: number of checkpoints; -1 for the default.
    """
    if not sizes.state_bytes:
        return serving
    state_bytes = sizes.state_bytes * serving.states_per_row
    rows = min(serving.max_rows, memory // 2 // state_bytes) if default_rows else serving.max_rows
    rows = max(1, rows)
    memory -= rows * (state_bytes - sizes.state_bytes)
    checkpoints = num_checkpoints
    if checkpoints < 0:
        checkpoints = default_checkpoints(rows, sizes.state_bytes, memory, has_kv=sizes.num_layers > 0)
    return replace(serving, max_rows=rows, num_checkpoints=checkpoints)


def host_states(serving: Serving, sizes: ModelSizes, memory: int, host_memory: int) -> int:
    """Return the number of recurrent states that a worker allocates in host memory.

    Args:
        serving: worker settings, as from `with_states`.
        sizes: the model.
        memory: bytes that states and KV may use on the device.
        host_memory: bytes of host memory.

    Raises:
        ConfigError: there is host memory, but too little for one state.
    """
    if not sizes.state_bytes or not host_memory:
        return 0
    row_blocks = -(-(serving.max_model_len or sizes.max_positions or 1 << 30) // serving.block_size)
    row_bytes = serving.states_per_row * sizes.state_bytes + row_blocks * block_bytes(sizes, serving)
    used = min(memory, serving.max_rows * row_bytes + serving.num_checkpoints * sizes.state_bytes)
    number = default_host_states(
        serving.max_rows,
        serving.num_checkpoints,
        sizes.state_bytes,
        memory=used,
        host_memory=host_memory,
        has_kv=sizes.num_layers > 0,
    )
    if not number:
        raise ConfigError(f"host_cache: {host_memory:,} bytes are too little for recurrent state; raise it, or use 0")
    return number


def fit(card_bytes: int, sizes: ModelSizes, serving: Serving, weights: int, step: int) -> Memory:
    """Return how the memory of a card is used.

    Args:
        card_bytes: bytes that the worker may use in total.
        sizes: the model.
        serving: settings of the worker.
        weights: bytes of the weights on one card.
        step: bytes for the activations of a step, on one card.

    Raises:
        ConfigError: no block of KV fits.
    """
    state = (serving.max_rows * serving.states_per_row + serving.num_checkpoints) * sizes.state_bytes
    kv = card_bytes - weights - step - state
    block, groups = block_bytes(sizes, serving), kv_groups(sizes, serving)
    longest = serving.max_model_len or sizes.max_positions or 1 << 30
    limits = Limits(
        max_rows=serving.max_rows,
        max_tokens_per_step=serving.max_tokens_per_step,
        max_model_len=longest,
        block_size=serving.block_size,
        num_blocks=0,
        vocab_size=sizes.vocab_size,
    )
    if weights or step:
        setting = f"memory: weights take {weights:,} bytes and a step {step:,}"
        setting += f", recurrent state {state:,}" if state else ""
    else:
        setting = "kv_cache_memory" + (f": recurrent state takes {state:,} bytes" if state else "")
    num_tables = 1 if groups is None else groups.num_groups
    num_blocks = count_blocks(kv, block, limits.max_rows * limits.max_blocks_per_row * num_tables, setting)
    return Memory(weights=weights, step=step, state=state, kv=kv, num_blocks=num_blocks)


MAX_TURNS = 100_000
"""Maximum number of turns of an agent's session."""


class Agent(NamedTuple):
    """The shape of an agent's session."""

    turns: int
    first_prompt: int
    """Prompt tokens of the first turn."""
    growth: int
    """Tokens that a turn adds to the sequence: its output, and the result of the tool."""

    def tokens(self, turn: int) -> int:
        """Return the length of the sequence when a turn ends and its tool has run; 0 is the first turn."""
        return self.first_prompt + (turn + 1) * self.growth


def concurrency(
    memory: Memory, sizes: ModelSizes, serving: Serving, *, context: int, output: int, shared_prefix: int
) -> Concurrency:
    """Return the number of requests that fit.

    Args:
        memory: the result of `fit`.
        sizes: the model.
        serving: settings of the worker.
        context: tokens of each request, prompt and output.
        output: generated tokens in each request.
        shared_prefix: number of leading prompt tokens that all requests share. Only full blocks are shared.

    Raises:
        ConfigError: an argument is out of range.
    """
    longest = serving.max_model_len or sizes.max_positions
    if longest and context > longest:
        raise ConfigError(f"--context: {context} exceeds the model's {longest} positions; lower it")
    if context < 1:
        raise ConfigError(f"--context: {context} is too small; use at least 1")
    if not 0 <= output <= context:
        raise ConfigError(f"--output: {output} is not between 0 and the context of {context} tokens; change it")
    if not 0 <= shared_prefix <= context - output:
        raise ConfigError(f"--shared-prefix: {shared_prefix} exceeds the prompt of {context - output} tokens; lower it")
    shared, groups = shared_prefix // serving.block_size, kv_groups(sizes, serving)

    def all_groups(num_positions: int) -> int:
        return num_positions if groups is None else groups.blocks(num_positions, serving.block_size)

    def blocks(tokens: int) -> int:
        return all_groups(-(-tokens // serving.block_size) - shared)

    def requests(each: int) -> int:
        # A request whose whole context is shared still needs a block, because its last token is computed.
        fitting = max(0, (memory.num_blocks - all_groups(shared)) // max(1, each))
        return min(fitting, serving.max_rows) if sizes.state_bytes else fitting

    whole = block_bytes(sizes, serving) * serving.tensor_parallel_size
    reserved = memory.num_blocks // all_groups(-(-longest // serving.block_size)) if longest else 0
    return Concurrency(
        context=context,
        blocks_per_request=blocks(context),
        kv_bytes_per_request=blocks(context) * whole,
        complete=requests(blocks(context)),
        average=requests(blocks(context - output + -(-output // 2))),
        reserved=reserved,
    )


_CHECKPOINTS_PER_SESSION = 3
"""Checkpoints that a turn of a session uses: the one it begins from, that of its prompt, and that of its end."""


def num_sessions(
    num_blocks: int, serving: Serving, agent: Agent, shared_prefix: int, groups: KVGroups | None = None
) -> int:
    """Return how many sessions of agents fit at a time if each may be in any of its turns.

    A session keeps the KV of all its tokens in layers without a window. In the others, it keeps the windows before the
    places that its last turn has used: where the turn began, the end of its prompt, and its own end.

    Args:
        num_blocks: blocks of all tiers.
        serving: settings of the worker.
        agent: the shape of a session.
        shared_prefix: number of leading tokens that all sessions share. Only full blocks are shared.
        groups: the KV groups; None if all layers keep all tokens.

    Raises:
        ConfigError: the shared prefix is longer than the first prompt.
    """
    if shared_prefix > agent.first_prompt:
        raise ConfigError(f"--shared-prefix: {shared_prefix} exceeds the agents' first prompt of {agent.first_prompt}")
    size = serving.block_size
    shared = shared_prefix // size
    in_windows = num_tables = 0
    if groups is not None:
        window, num_tables = -(-(groups.window - 1) // size), groups.num_groups - 1
        in_windows = min(window - (-agent.growth // size), 3 * window)
    own = 0
    for turn in range(agent.turns):
        positions = -(-agent.tokens(turn) // size)
        own += positions - shared + num_tables * min(positions, in_windows)
    return max(0, num_blocks - shared) * agent.turns // max(1, own)


def sessions_with_states(serving: Serving) -> int:
    """Return for how many sessions a worker with recurrent state has checkpoints."""
    return serving.num_checkpoints // _CHECKPOINTS_PER_SESSION
