"""The Llama family, written by hand over `kernels`: Llama, Mistral, Qwen2 and Qwen3.

One decoder serves all of them, because they differ in four places only: biases on the projections (Qwen2), a norm on
queries and keys (Qwen3), a sliding window per layer (Mistral, Qwen2), tied embeddings. Query, key and value
projections are one matrix, gate and up another, so that a layer is four GEMMs. The residual addition is part of the
norm that follows it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.functional import embedding, linear
from transformers import PretrainedConfig

from kernels.activation import silu_mul
from kernels.decoder import PackedDecoder
from kernels.linear import empty_weight
from kernels.native.library import Native
from kernels.norm import rms_norm
from kernels.paged_attention import DecodeSchedule, paged_attention
from kernels.qkv import rotate_and_cache
from worker_svc.model import llama_packed
from worker_svc.model.base import AttentionInputs, KVCache, KVShape
from worker_svc.model.llama_layer import Layer, Linear
from worker_svc.model.rope import ROPE_TYPES, rope_tables
from worker_svc.model.weights import copy_weights

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def supports(architecture: str, config: PretrainedConfig) -> bool:
    """Whether this module computes the model exactly as configured; what it does not, the other path may."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        architecture in ARCHITECTURES
        and getattr(config, "hidden_act", None) == "silu"
        and rope.get("rope_type") in ROPE_TYPES
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
    )


class LlamaModel:
    """A decoder of the family; `load` or `randomise` fills the weights that the constructor allocates.

    With `cpu_kernels` the weights are packed for them once they are filled, and a step is one call.
    """

    def __init__(
        self,
        architecture: str,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        cpu_kernels: Native | None = None,
        quantization: str = "none",
    ) -> None:
        self._config = config
        self._cpu_kernels = cpu_kernels
        self._quantization = quantization
        self._packed: PackedDecoder | None = None
        self._dtype = dtype
        self._device = device
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._num_heads
        self._scale = self._head_dim**-0.5
        self._eps: float = config.rms_norm_eps
        self._tied: bool = config.tie_word_embeddings
        self._cos, self._sin = rope_tables(config, self._head_dim, num_positions, device)

        hidden: int = config.hidden_size
        self._head = self._empty_weight(config.vocab_size, hidden)
        self._embedding = self._head if self._tied else self._empty(config.vocab_size, hidden)
        self._final_norm = self._empty(hidden)
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        attention_bias: bool = getattr(config, "attention_bias", False)
        self._layers = [
            self._allocate_layer(
                index,
                qkv_bias=is_qwen2 or attention_bias,
                output_bias=attention_bias and not is_qwen2,
                mlp_bias=getattr(config, "mlp_bias", False),
                qk_norm=architecture == "Qwen3ForCausalLM",
            )
            for index in range(config.num_hidden_layers)
        ]

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """See `Model.kv_shapes`."""
        return (KVShape(self._num_kv_heads, self._head_dim),) * int(self._config.num_hidden_layers)

    @property
    def capturable(self) -> bool:
        """See `Model.capturable`."""
        return True

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Model.forward`."""
        num_logits = (input_ids if logits_index is None else logits_index).shape[0]
        return self._run(input_ids, positions, attention, caches, logits_index, num_logits)[0]

    @property
    def hidden_size(self) -> int:
        """See `Model.hidden_size`."""
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
        """See `Model.forward_hidden`."""
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
        """Logits of the first `num_logits` tokens in `kept_index`, last hidden states of the others."""
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
            )
        hidden = self._hidden(input_ids, positions, attention, caches, kept_index)
        return linear(hidden[:num_logits], self._head), hidden[num_logits:]

    def _hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        """The last hidden states, normed, of the tokens in `index`; None: of all."""
        cos, sin = self._cos[positions], self._sin[positions]
        update = embedding(input_ids, self._embedding)
        residual: torch.Tensor | None = None
        windows = {layer.sliding_window for layer in self._layers}
        schedules = {window: attention.schedule(window, self._num_kv_heads) for window in windows}
        for layer, cache in zip(self._layers, caches, strict=True):
            normed, residual = self._add_norm(update, layer.input_norm, residual)
            attended = self._attend(layer, normed, cos, sin, attention, cache, schedules[layer.sliding_window])
            normed, residual = self._add_norm(attended, layer.mlp_norm, residual)
            update = layer.down(silu_mul(layer.gate_up(normed)))
        if index is not None:
            update = update[index]
            residual = None if residual is None else residual[index]
        normed, _ = self._add_norm(update, self._final_norm, residual)
        return normed

    @property
    def packed(self) -> PackedDecoder | None:
        """What computes a step where the CPU kernels do."""
        return self._packed

    def load(self, folder: Path) -> None:
        """Reads the weights of a checkpoint.

        Raises:
            ConfigError: they do not fit the configuration.
        """
        tied = frozenset({"lm_head.weight"}) if self._tied else frozenset[str]()
        copy_weights(folder, dict(self._named_weights()), optional=tied)
        self._pack()

    def randomise(self, seed: int) -> None:
        """Draws all weights, made on the device: matrices normal, norms 1, biases 0."""
        generator = torch.Generator(self._device).manual_seed(seed)
        for name, weight in self._named_weights():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name.endswith(".bias"):
                weight.zero_()
            else:
                weight.normal_(0.0, self._config.initializer_range, generator=generator)
        self._pack()

    def _pack(self) -> None:
        """Hands the weights over to the CPU kernels, where those serve; they are no matrices any more then."""
        if self._cpu_kernels is None:
            return
        self._packed = llama_packed.pack(
            self._cpu_kernels,
            llama_packed.shape_of(self._config),
            self._layers,
            embedding=None if self._tied else self._embedding,
            final_norm=self._final_norm,
            head=self._head,
            cos=self._cos,
            sin=self._sin,
            quantization=self._quantization,
        )
        self._layers.clear()
        del self._embedding, self._head

    def _add_norm(
        self, update: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum of residual stream and update, and the sum; before the first layer there is no stream."""
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
        cache: KVCache,
        schedule: DecodeSchedule | None,
    ) -> torch.Tensor:
        k_cache, v_cache = cache
        query = rotate_and_cache(
            layer.qkv(hidden),
            layer.query_norm,
            layer.key_norm,
            self._eps,
            cos,
            sin,
            k_cache,
            v_cache,
            attention.slot_mapping,
        )
        attended = paged_attention(
            query,
            k_cache,
            v_cache,
            attention.block_tables,
            attention.query_start,
            attention.context_lens,
            max_query_len=attention.max_query_len,
            min_query_len=attention.min_query_len,
            num_leading_decodes=attention.num_leading_decodes,
            scale=self._scale,
            sliding_window=layer.sliding_window,
            schedule=schedule,
        )
        return layer.output(attended.view(hidden.shape[0], -1))

    def _allocate_layer(self, index: int, *, qkv_bias: bool, output_bias: bool, mlp_bias: bool, qk_norm: bool) -> Layer:
        config = self._config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        query_size = self._num_heads * self._head_dim
        return Layer(
            input_norm=self._empty(hidden),
            qkv=self._linear(hidden, query_size + 2 * self._num_kv_heads * self._head_dim, bias=qkv_bias),
            query_norm=self._empty(self._head_dim) if qk_norm else None,
            key_norm=self._empty(self._head_dim) if qk_norm else None,
            output=self._linear(query_size, hidden, bias=output_bias),
            mlp_norm=self._empty(hidden),
            gate_up=self._linear(hidden, 2 * intermediate, bias=mlp_bias),
            down=self._linear(intermediate, hidden, bias=mlp_bias),
            sliding_window=_sliding_window(config, index),
        )

    def _named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor of a checkpoint by name, as a view of where it belongs."""
        kv_size = self._num_kv_heads * self._head_dim
        qkv_parts = (self._num_heads * self._head_dim, kv_size, kv_size)
        gate_up_parts = (self._config.intermediate_size,) * 2
        yield "model.embed_tokens.weight", self._embedding
        if not self._tied:
            yield "lm_head.weight", self._head
        yield "model.norm.weight", self._final_norm
        for index, layer in enumerate(self._layers):
            prefix = f"model.layers.{index}"
            yield f"{prefix}.input_layernorm.weight", layer.input_norm
            yield f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            yield from _named_parts(attention, ("q_proj", "k_proj", "v_proj"), layer.qkv, qkv_parts)
            yield from _named_parts(attention, ("o_proj",), layer.output, (layer.output.weight.shape[0],))
            yield from _named_parts(mlp, ("gate_proj", "up_proj"), layer.gate_up, gate_up_parts)
            yield from _named_parts(mlp, ("down_proj",), layer.down, (layer.down.weight.shape[0],))
            if layer.query_norm is not None and layer.key_norm is not None:
                yield f"{attention}.q_norm.weight", layer.query_norm
                yield f"{attention}.k_norm.weight", layer.key_norm

    def _linear(self, inputs: int, outputs: int, *, bias: bool) -> Linear:
        return Linear(self._empty_weight(outputs, inputs), self._empty(outputs) if bias else None)

    def _empty_weight(self, outputs: int, inputs: int) -> torch.Tensor:
        if self._cpu_kernels is not None:
            return empty_weight(outputs, inputs, self._dtype)
        return self._empty(outputs, inputs)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _named_parts(
    prefix: str, names: tuple[str, ...], merged: Linear, sizes: tuple[int, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in zip(names, torch.split(merged.weight, list(sizes)), strict=True):
        yield f"{prefix}.{name}.weight", weight
    if merged.bias is not None:
        for name, bias in zip(names, torch.split(merged.bias, list(sizes)), strict=True):
            yield f"{prefix}.{name}.bias", bias


def _sliding_window(config: PretrainedConfig, layer: int) -> int | None:
    """The window of one layer: where the configuration lists types of layers they decide, else all layers have it."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[layer] != "sliding_attention":
        return None
    return window
