"""The Llama family on a CPU, with weights packed for `kernels.native` and one native call per step.

This module checks whether the kernels support a model. If so, it packs the model's weights. Otherwise, `llama` computes
with torch.
"""

import torch

from kernels import linear as packed_linear
from kernels.decoder import (
    DecoderPart,
    DecoderShape,
    LayerWeights,
    MixtureWeights,
    MlpWeights,
    PackedDecoder,
    why_unsupported,
)
from kernels.linear import PackedLinear
from kernels.native.library import Native
from kernels.native.serving import native
from shared.config import ConfigError
from worker_svc.model.decoder_config import DecoderConfig
from worker_svc.model.families import head_dim
from worker_svc.model.llama_layer import Layer, Linear, Mixture, Mlp
from worker_svc.model.quantised import StoredWeights
from worker_svc.ranks.shard import WHOLE, Shard


def shape_of(config: DecoderConfig, shard: Shard = WHOLE) -> DecoderShape:
    """Return the kernel sizes for the model, or for one rank's part."""
    size = head_dim(config)
    return DecoderShape(
        hidden_size=config.hidden_size,
        num_heads=shard.span(config.num_attention_heads).length,
        num_kv_heads=len(shard.kv_heads(config.num_attention_heads, config.num_key_value_heads)),
        head_dim=size,
        eps=config.rms_norm_eps,
        scale=size**-0.5,
    )


def choose_kernels(config: DecoderConfig, dtype: torch.dtype, device: torch.device, quantization: str) -> Native | None:
    """Return the native CPU kernels if they support this model; None if torch computes it.

    Raises:
        ConfigError: `quantization` needs these kernels, and they do not support the model.
    """
    reason = why_unsupported(shape_of(config), dtype) if device.type == "cpu" else f"the device is {device.type}"
    kernels = native() if reason is None else None
    if kernels is not None:
        return kernels
    reason = reason or "they are not built, failed their self-test (see the log), or are off (QUIRE_CPU_KERNELS)"
    if quantization != "none":
        raise ConfigError(
            f"quantization: {quantization} needs the native CPU kernels, which are not available: {reason}; use none"
        )
    return None


def pack(
    kernels: Native,
    shape: DecoderShape,
    layers: list[Layer],
    *,
    embedding: torch.Tensor | None,
    final_norm: torch.Tensor,
    head: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    quantization: str,
    stored: StoredWeights,
    part: DecoderPart | None,
) -> PackedDecoder:
    """Pack all weights: in place, quantised, or as a quantised checkpoint stores them.

    `layers` is emptied layer by layer, so that quantised weights need little additional memory. With int4, the LM head
    (possibly also the embedding) has int8 weights, because it affects the output most. Routers and shared-expert gates
    are not quantised, because they are small and rounding would change the choice of experts.
    """

    def convert(linear: Linear, kind: str = quantization) -> PackedLinear:
        as_stored = stored.pack(linear.weight, linear.bias)
        if as_stored is not None:
            return as_stored
        if kind == "int4":
            return packed_linear.quantise_int4(linear.weight, linear.bias, kernels=kernels)
        if kind == "int8":
            return packed_linear.quantise(linear.weight, linear.bias, kernels=kernels)
        return packed_linear.pack(linear.weight, linear.bias, kernels=kernels)

    def convert_mlp(mlp: Mlp) -> MlpWeights:
        return MlpWeights(gate_up=convert(mlp.gate_up), down=convert(mlp.down))

    def convert_mixture(mixture: Mixture) -> MixtureWeights:
        assert isinstance(mixture.gate_up, torch.Tensor)
        assert isinstance(mixture.down, torch.Tensor)
        experts = zip(mixture.gate_up, mixture.down, strict=True)
        return MixtureWeights(
            router=convert(mixture.router, "none"),
            experts=[convert_mlp(Mlp(Linear(gate_up, None), Linear(down, None))) for gate_up, down in experts],
            top_k=mixture.top_k,
            renormalise=mixture.renormalise,
            shared=None if mixture.shared is None else convert_mlp(mixture.shared),
            shared_gate=None if mixture.shared_gate is None else convert(mixture.shared_gate, "none"),
        )

    rows: torch.Tensor | PackedLinear | None = embedding
    if embedding is not None:
        rows = stored.pack(embedding, None) or embedding  # Its rows are unpacked one by one.
    packed = []
    layers.reverse()
    while layers:
        layer = layers.pop()
        packed.append(
            LayerWeights(
                input_norm=layer.input_norm,
                qkv=convert(layer.qkv),
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                output=convert(layer.output),
                mlp_norm=layer.mlp_norm,
                mlp=convert_mlp(layer.mlp) if isinstance(layer.mlp, Mlp) else convert_mixture(layer.mlp),
                sliding_window=layer.sliding_window,
            )
        )
        del layer
    return PackedDecoder(
        kernels,
        shape,
        packed,
        embedding=rows,
        final_norm=final_norm,
        head=convert(Linear(head, None), "int8" if quantization == "int4" else quantization),
        cos=cos,
        sin=sin,
        part=part,
    )
