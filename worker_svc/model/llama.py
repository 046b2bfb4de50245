"""Native implementation of the Llama family over `kernels`: Llama, Mistral, Mixtral, Qwen2, Qwen3 and gpt-oss.

One decoder implements all `families`. They differ only in these properties:

* biases on the projections (Qwen2);
* a norm on queries and keys (Qwen3);
* a sliding window per layer (all but Llama);
* mixtures of experts instead of MLPs (Mixtral, Qwen-MoE, gpt-oss);
* attention sinks, and experts with biases and a clamped activation (gpt-oss);
* tied embeddings.

The query, key and value projections are one matrix, gate and up another, so that a layer has four
GEMMs. The residual addition is fused with the next norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import embedding

from kernels.activation import ClampedSwiglu
from kernels.decoder import DecoderPart, PackedDecoder
from kernels.experts import ExpertWeights
from kernels.linear import empty_weights
from kernels.native.library import Native
from kernels.norm import rms_norm
from kernels.paged_attention import DecodeSchedule, paged_attention
from kernels.qkv import rotate_and_cache
from worker_svc.model import llama_packed, weight_only
from worker_svc.model.base import AttentionInputs, KVCache, KVShape
from worker_svc.model.decoder_config import DecoderConfig
from worker_svc.model.families import FAMILIES, Experts, Family, has_bias, head_dim, mixture_layers, mlps, windows
from worker_svc.model.llama_layer import Codes, Layer, Linear, Mixture, Mlp
from worker_svc.model.quantised import StoredWeights, log_form
from worker_svc.model.recurrent import RowStates, StateCounts
from worker_svc.model.rope import rope_tables
from worker_svc.model.weights import copy_weights, holds_different, tensor_names
from worker_svc.ranks.group import Group
from worker_svc.ranks.shard import Cut, spans_of

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class LlamaModel:
    """A Llama-family decoder. The constructor allocates the weights; `load` or `randomise` fills them.

    With `cpu_kernels` the filled weights are packed for the native kernels, and a step is one call.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        cpu_kernels: Native | None = None,
        quantization: str = "none",
        group: Group | None = None,
        keeps_codes: bool = False,
    ) -> None:
        """Allocate the weights.

        Args:
            config: sizes of the model.
            dtype: type of weights and activations.
            device: the device of the model.
            num_positions: length of the longest sequence in tokens.
            cpu_kernels: the kernels that compute the model on a CPU; None: the operations of `kernels`.
            quantization: quantization of the weights at load: "none", "int8" or "int4"; "fp8" with `keeps_codes`.
            group: the ranks that share the model; None if this process has all of it.
            keeps_codes: whether matrices may stay quantised without `cpu_kernels` (`weight_only`). They are then
                allocated on the host, and go to the device one by one.
        """
        self._config = config
        self._group = group or Group()
        shard = self._group.shard
        self._cpu_kernels = cpu_kernels
        self._quantization = quantization
        self._packed: PackedDecoder | None = None
        self._dtype = dtype
        self._device = device
        self._keeps_codes = keeps_codes
        self._host = torch.device("cpu") if keeps_codes else device
        # The number in this rank's part of the model.
        self._heads = shard.span(config.num_attention_heads)
        self._kv_heads = shard.kv_heads(config.num_attention_heads, config.num_key_value_heads)
        self._tokens = shard.vocabulary(config.vocab_size)
        self._num_kv_heads = len(self._kv_heads)
        self._head_dim = head_dim(config)
        self._scale = self._head_dim**-0.5
        self._eps: float = config.rms_norm_eps
        self._tied: bool = config.tie_word_embeddings
        self._cos, self._sin = rope_tables(config, self._head_dim, num_positions, device)

        hidden: int = config.hidden_size
        self._head = self._empty_weight(self._tokens.length, hidden)
        self._head_codes: Codes = ()
        self._embedding = self._head if self._tied else self._empty(self._tokens.length, hidden)
        self._final_norm = self._empty(hidden)
        self._family = FAMILIES[config.model_type]
        self._layers = [
            self._allocate_layer(self._family, sliding_window=window, mixture=mixture)
            for window, mixture in zip(windows(config), mixture_layers(config), strict=True)
        ]

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return (KVShape(self._num_kv_heads, self._head_dim),) * int(self._config.num_hidden_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(windows(self._config))

    @property
    def state_bytes(self) -> int:
        return 0

    def allocate_states(self, counts: StateCounts) -> None:
        """Do nothing: a row has only keys and values."""

    @property
    def states(self) -> RowStates | None:
        return None

    @property
    def capturable(self) -> bool:
        return True

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> torch.Tensor:
        num_logits = (input_ids if logits_index is None else logits_index).shape[0]
        return self._run(input_ids, positions, attention, caches, logits_index, num_logits)[0]

    @property
    def hidden_size(self) -> int:
        return int(self._config.hidden_size)

    def forward_hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor,
        hidden_index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.cat((logits_index, hidden_index))
        return self._run(input_ids, positions, attention, caches, kept, len(logits_index))

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        kept_index: torch.Tensor | None,
        num_logits: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits for the first `num_logits` tokens in `kept_index`, and last hidden states for the others."""
        if self._packed is not None:
            return self._packed.run(
                input_ids,
                positions,
                attention.slot_mapping,
                attention.block_tables,
                attention.query_start,
                attention.context_lens,
                caches,
                kept_index,
                num_logits=num_logits,
                groups=attention.table_numbers,
                windowed=attention.windowed,
            )
        hidden = self._hidden(input_ids, positions, attention, caches, kept_index)
        return Linear(self._head, None, self._head_codes)(hidden[:num_logits]), hidden[num_logits:]

    def _hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the last hidden states, after the final norm, for the tokens in `index`; None for all tokens."""
        cos, sin = self._cos[positions], self._sin[positions]
        update = self._embed(input_ids)
        residual: torch.Tensor | None = None
        windows = {layer.sliding_window for layer in self._layers}
        schedules = {window: attention.schedule(window, self._num_kv_heads) for window in windows}
        for number, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            normed, residual = self._add_norm(update, layer.input_norm, residual)
            places = attention.places(number)
            attended = self._attend(layer, normed, cos, sin, attention, places, cache, schedules[layer.sliding_window])
            normed, residual = self._add_norm(attended, layer.mlp_norm, residual)
            update = self._group.all_reduce(layer.mlp(normed))
        if index is not None:
            update = update[index]
            residual = None if residual is None else residual[index]
        normed, _ = self._add_norm(update, self._final_norm, residual)
        return normed

    @property
    def packed(self) -> PackedDecoder | None:
        """The decoder with packed weights, if the native CPU kernels are used."""
        return self._packed

    def load(self, folder: Path) -> None:
        """Read the weights of a checkpoint.

        Raises:
            ConfigError: the weights do not match the configuration.
        """
        if self._tied and holds_different(folder, _EMBEDDING, _HEAD):
            # `transformers` does not tie weights that differ in the checkpoint, even if config.json ties them.
            self._tied = False
            self._embedding = self._empty(*self._head.shape)
        tied = frozenset({_HEAD}) if self._tied else frozenset[str]()
        # If the target format has its own quantization, a quantised checkpoint is dequantised first.
        stored = StoredWeights()
        keeps = (self._cpu_kernels is not None or self._keeps_codes) and self._quantization == "none"
        weights, cuts = dict(self._named_weights(tensor_names(folder))), self._cuts()
        copy_weights(folder, weights, optional=tied, stored=stored if keeps else None, cuts=cuts)
        self._pack(stored)
        stored.check_empty()
        log_form(num_packed=stored.num_packed, num_dequantised=stored.num_dequantised, dtype=self._dtype)

    def randomise(self, seed: int) -> None:
        """Draw random weights on the device: matrices from a normal distribution, norms 1, biases 0."""
        generator = torch.Generator(self._host).manual_seed(seed)
        cuts = self._cuts()
        for name, weight in self._named_weights(frozenset()):
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name.endswith("bias"):
                weight.zero_()
            elif (cut := cuts.get(name)) is None:
                weight.normal_(0.0, self._config.initializer_range, generator=generator)
            else:
                whole = self._empty(*(cut.whole if dim == cut.dim else n for dim, n in enumerate(weight.shape)))
                whole.normal_(0.0, self._config.initializer_range, generator=generator)
                weight.copy_(cut.of(whole))
        self._pack(StoredWeights())

    def _pack(self, stored: StoredWeights) -> None:
        """Pack the weights for the native CPU kernels, if they are used, and drop the matrices."""
        if self._group.rank > 0:  # Only rank 0 adds biases to sums over all ranks.
            for layer in self._layers:
                mlp_bias = layer.mlp.down.bias if isinstance(layer.mlp, Mlp) else layer.mlp.down_bias
                for bias in (layer.output.bias, mlp_bias):
                    if bias is not None:
                        bias.zero_()
        if self._cpu_kernels is None:
            if self._keeps_codes:
                self._move(stored)
            return
        part = None
        if self._group.size > 1:
            part = DecoderPart(self._group.rank, self._group.all_reduce, self._tokens.begin)
        self._packed = llama_packed.pack(
            self._cpu_kernels,
            llama_packed.shape_of(self._config, self._group.shard),
            self._layers,
            embedding=None if self._tied else self._embedding,
            final_norm=self._final_norm,
            head=self._head,
            cos=self._cos,
            sin=self._sin,
            quantization=self._quantization,
            stored=stored,
            part=part,
        )
        self._layers.clear()
        del self._embedding, self._head

    def _move(self, stored: StoredWeights) -> None:
        """Move the weights to the device matrix by matrix, quantised if possible.

        As on a CPU, routers and gates of shared experts are not quantised, and `--quantization int4` gives the LM head
        int8 weights.
        """

        def moved(linear: Linear, kind: str = self._quantization) -> Linear:
            codes = weight_only.coded(linear.weight, stored, kind, self._device)
            bias = None if linear.bias is None else linear.bias.to(self._device)
            if not codes:
                return Linear(linear.weight.to(self._device), bias)
            return Linear(torch.empty(0, dtype=self._dtype, device=self._device), bias, codes)

        def moved_mlp(mlp: Mlp) -> Mlp:
            return Mlp(moved(mlp.gate_up), moved(mlp.down))

        def moved_experts(matrices: ExpertWeights) -> ExpertWeights:
            assert isinstance(matrices, torch.Tensor)
            codes = weight_only.coded_experts(matrices, stored, self._quantization, self._device)
            return matrices.to(self._device) if codes is None else codes

        def moved_tensor(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(self._device)

        def moved_mixture(mixture: Mixture) -> Mixture:
            return replace(
                mixture,
                router=moved(mixture.router, "none"),
                gate_up=moved_experts(mixture.gate_up),
                down=moved_experts(mixture.down),
                gate_up_bias=moved_tensor(mixture.gate_up_bias),
                down_bias=moved_tensor(mixture.down_bias),
                shared=None if mixture.shared is None else moved_mlp(mixture.shared),
                shared_gate=None if mixture.shared_gate is None else moved(mixture.shared_gate, "none"),
            )

        for index, layer in enumerate(self._layers):
            self._layers[index] = Layer(
                input_norm=layer.input_norm.to(self._device),
                qkv=moved(layer.qkv),
                query_norm=moved_tensor(layer.query_norm),
                key_norm=moved_tensor(layer.key_norm),
                output=moved(layer.output),
                mlp_norm=layer.mlp_norm.to(self._device),
                mlp=moved_mlp(layer.mlp) if isinstance(layer.mlp, Mlp) else moved_mixture(layer.mlp),
                sliding_window=layer.sliding_window,
                sinks=moved_tensor(layer.sinks),
            )
        self._final_norm = self._final_norm.to(self._device)
        if self._tied:  # The rows of an embedding are not quantised.
            stored.fill(self._head)
            self._embedding = self._head = self._head.to(self._device)
            return
        stored.fill(self._embedding)
        self._embedding = self._embedding.to(self._device)
        head = moved(Linear(self._head, None), "int8" if self._quantization == "int4" else self._quantization)
        self._head, self._head_codes = head.weight, head.codes

    def _add_norm(
        self, update: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of residual + update, and the sum; `residual` is None in the first layer."""
        if residual is None:
            return rms_norm(update, weight, self._eps), update
        return rms_norm(update, weight, self._eps, residual=residual)

    def _attend(
        self,
        layer: Layer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionInputs,
        places: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        schedule: DecodeSchedule | None,
    ) -> torch.Tensor:
        k_cache, v_cache = cache
        slot_mapping, block_tables = places
        query = rotate_and_cache(
            layer.qkv(hidden),
            layer.query_norm,
            layer.key_norm,
            self._eps,
            cos,
            sin,
            k_cache,
            v_cache,
            slot_mapping,
        )
        attended = paged_attention(
            query,
            k_cache,
            v_cache,
            block_tables,
            attention.query_start,
            attention.context_lens,
            max_query_len=attention.max_query_len,
            min_query_len=attention.min_query_len,
            num_leading_decodes=attention.num_leading_decodes,
            scale=self._scale,
            sliding_window=layer.sliding_window,
            sinks=layer.sinks,
            schedule=schedule,
        )
        return self._group.all_reduce(layer.output(attended.view(hidden.shape[0], -1)))

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return embedding(input_ids, self._embedding)
        places = input_ids - self._tokens.begin
        elsewhere = (places < 0) | (places >= self._tokens.length)
        found = embedding(places.clamp(0, self._tokens.length - 1), self._embedding)
        return self._group.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _allocate_layer(self, family: Family, *, sliding_window: int | None, mixture: bool) -> Layer:
        config = self._config
        hidden = config.hidden_size
        query_size = self._heads.length * self._head_dim
        qkv_bias = has_bias(family.qkv_bias, config)
        return Layer(
            input_norm=self._empty(hidden),
            qkv=self._linear(hidden, query_size + 2 * self._num_kv_heads * self._head_dim, bias=qkv_bias),
            query_norm=self._empty(self._head_dim) if family.qk_norm else None,
            key_norm=self._empty(self._head_dim) if family.qk_norm else None,
            output=self._linear(query_size, hidden, bias=has_bias(family.output_bias, config)),
            mlp_norm=self._empty(hidden),
            mlp=self._mixture(family.experts)
            if mixture and family.experts is not None
            else self._mlp(config.intermediate_size, bias=has_bias(family.mlp_bias, config)),
            sliding_window=sliding_window,
            sinks=torch.empty(self._heads.length, device=self._host) if family.sinks else None,
        )

    def _mlp(self, intermediate: int, *, bias: bool) -> Mlp:
        hidden, inner = self._config.hidden_size, self._group.shard.span(intermediate).length
        return Mlp(self._linear(hidden, 2 * inner, bias=bias), self._linear(inner, hidden, bias=bias))

    def _mixture(self, experts: Experts) -> Mixture:
        config = self._config
        hidden, count = config.hidden_size, config.num_experts
        inner = self._group.shard.span(getattr(config, experts.intermediate_size)).length
        merged = experts.merged
        return Mixture(
            router=self._linear(hidden, count, bias=merged),
            gate_up=self._empty_weights(count, 2 * inner, hidden),
            down=self._empty_weights(count, hidden, inner),
            top_k=config.num_experts_per_tok,
            renormalise=config.norm_topk_prob if experts.renormalise is None else experts.renormalise,
            shared=self._mlp(config.shared_expert_intermediate_size, bias=False) if experts.shared else None,
            shared_gate=self._linear(hidden, 1, bias=False) if experts.shared else None,
            gate_up_bias=self._empty(count, 2 * inner) if merged else None,
            down_bias=self._empty(count, hidden) if merged else None,
            clamped=ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit) if merged else None,
        )

    def _named_weights(self, given: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of each checkpoint tensor, and the view on the weights that the tensor fills.

        `given` are the checkpoint's names, which show the layout of its experts.
        """
        kv_size = self._num_kv_heads * self._head_dim
        qkv_parts = (self._heads.length * self._head_dim, kv_size, kv_size)
        yield _EMBEDDING, self._embedding
        if not self._tied:
            yield _HEAD, self._head
        yield "model.norm.weight", self._final_norm
        for index, layer in enumerate(self._layers):
            prefix = f"model.layers.{index}"
            yield f"{prefix}.input_layernorm.weight", layer.input_norm
            yield f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm
            attention = f"{prefix}.self_attn"
            yield from _named_parts(attention, ("q_proj", "k_proj", "v_proj"), layer.qkv, qkv_parts)
            yield from _named_parts(attention, ("o_proj",), layer.output, (layer.output.weight.shape[0],))
            if layer.query_norm is not None and layer.key_norm is not None:
                yield f"{attention}.q_norm.weight", layer.query_norm
                yield f"{attention}.k_norm.weight", layer.key_norm
            if layer.sinks is not None:
                yield f"{attention}.sinks", layer.sinks
            if isinstance(layer.mlp, Mlp):
                yield from _named_mlp(f"{prefix}.mlp", layer.mlp, Experts())
            elif self._family.experts is not None and self._family.experts.merged:
                yield from _named_merged(f"{prefix}.mlp", layer.mlp)
            elif f"{prefix}.mlp.experts.gate_up_proj" in given:  # This is the format of the classes in `transformers`.
                yield f"{prefix}.mlp.gate.weight", layer.mlp.router.weight
                gate_up, down = _matrices(layer.mlp)
                yield f"{prefix}.mlp.experts.gate_up_proj", gate_up
                yield f"{prefix}.mlp.experts.down_proj", down
                yield from _named_shared(f"{prefix}.mlp", layer.mlp)
            elif self._family.experts is not None:
                yield from _named_mixture(prefix, layer.mlp, self._family.experts)

    def _cuts(self) -> dict[str, Cut]:
        """Return this rank's part of each checkpoint tensor; tensors that are not listed are whole."""
        config = self._config
        if self._group.size == 1:
            return {}
        tokens = Cut(0, (self._tokens,), config.vocab_size)
        cuts = {_EMBEDDING: tokens, _HEAD: tokens}
        heads = Cut(0, (self._heads,), config.num_attention_heads).times(self._head_dim)
        kv_heads = Cut(0, spans_of(self._kv_heads), config.num_key_value_heads).times(self._head_dim)
        for index, mixed in enumerate(mixture_layers(config)):
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            cuts[f"{attention}.sinks"] = Cut(0, (self._heads,), config.num_attention_heads)
            outputs = {f"{attention}.q_proj": heads, f"{attention}.k_proj": kv_heads, f"{attention}.v_proj": kv_heads}
            inputs = {f"{attention}.o_proj": heads}
            for mlp, names, size in mlps(prefix, config, mixed=mixed):
                inner = Cut(0, (self._group.shard.span(size),), size)
                # One tensor with all experts, the format of the classes in `transformers`.
                if mlp.endswith(".experts.0"):
                    merged = f"{prefix}.mlp.experts"
                    if names.merged:
                        cuts[f"{merged}.gate_up_proj"] = replace(inner.times(2), dim=2)
                        cuts[f"{merged}.gate_up_proj_bias"] = replace(inner.times(2), dim=1)
                        cuts[f"{merged}.down_proj"] = replace(inner, dim=1)
                    else:
                        cuts[f"{merged}.gate_up_proj"] = replace(inner.twice(), dim=1)
                        cuts[f"{merged}.down_proj"] = replace(inner, dim=2)
                outputs |= {f"{mlp}.{names.gate}": inner, f"{mlp}.{names.up}": inner}
                inputs[f"{mlp}.{names.down}"] = inner
            for name, cut in outputs.items():
                cuts[f"{name}.weight"] = cuts[f"{name}.bias"] = cut
            cuts |= {f"{name}.weight": replace(cut, dim=1) for name, cut in inputs.items()}
        return cuts

    def _linear(self, inputs: int, outputs: int, *, bias: bool) -> Linear:
        return Linear(self._empty_weight(outputs, inputs), self._empty(outputs) if bias else None)

    def _empty_weight(self, outputs: int, inputs: int) -> torch.Tensor:
        return self._empty_weights(1, outputs, inputs)[0]

    def _empty_weights(self, count: int, outputs: int, inputs: int) -> torch.Tensor:
        if self._cpu_kernels is not None:
            return empty_weights(count, outputs, inputs, self._dtype)
        return self._empty(count, outputs, inputs)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._host)


def _named_mlp(prefix: str, mlp: Mlp, names: Experts) -> Iterator[tuple[str, torch.Tensor]]:
    half = mlp.gate_up.weight.shape[0] // 2
    yield from _named_parts(prefix, (names.gate, names.up), mlp.gate_up, (half, half))
    yield from _named_parts(prefix, (names.down,), mlp.down, (mlp.down.weight.shape[0],))


def _named_mixture(layer: str, mixture: Mixture, names: Experts) -> Iterator[tuple[str, torch.Tensor]]:
    block = f"{layer}.{names.block}"
    yield f"{block}.gate.weight", mixture.router.weight
    for number, (gate_up, down) in enumerate(zip(*_matrices(mixture), strict=True)):
        yield from _named_mlp(f"{block}.experts.{number}", Mlp(Linear(gate_up, None), Linear(down, None)), names)
    yield from _named_shared(block, mixture)


def _named_merged(block: str, mixture: Mixture) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of gpt-oss's mixture, which stores the transposed matrices of all experts in one tensor."""
    gate_up, down = _matrices(mixture)
    yield f"{block}.router.weight", mixture.router.weight
    yield f"{block}.experts.gate_up_proj", gate_up.transpose(1, 2)
    yield f"{block}.experts.down_proj", down.transpose(1, 2)
    for name, bias in (
        ("router.bias", mixture.router.bias),
        ("experts.gate_up_proj_bias", mixture.gate_up_bias),
        ("experts.down_proj_bias", mixture.down_bias),
    ):
        if bias is not None:
            yield f"{block}.{name}", bias


def _matrices(mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices of the experts before they may be quantised."""
    assert isinstance(mixture.gate_up, torch.Tensor)
    assert isinstance(mixture.down, torch.Tensor)
    return mixture.gate_up, mixture.down


def _named_shared(block: str, mixture: Mixture) -> Iterator[tuple[str, torch.Tensor]]:
    if mixture.shared is not None and mixture.shared_gate is not None:
        yield from _named_mlp(f"{block}.shared_expert", mixture.shared, Experts())
        yield f"{block}.shared_expert_gate.weight", mixture.shared_gate.weight


def _named_parts(
    prefix: str, names: tuple[str, ...], merged: Linear, sizes: tuple[int, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in zip(names, torch.split(merged.weight, list(sizes)), strict=True):
        yield f"{prefix}.{name}.weight", weight
    if merged.bias is not None:
        for name, bias in zip(names, torch.split(merged.bias, list(sizes)), strict=True):
            yield f"{prefix}.{name}.bias", bias
