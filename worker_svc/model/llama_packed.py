"""The Llama family on a CPU: its weights packed for the kernels of `kernels.native`, its layers run in one call.

This module decides whether that can be done for a model, and does it. Where it cannot, `llama` computes with torch.
"""

import torch
from transformers import PretrainedConfig

from kernels import linear as packed_linear
from kernels.decoder import DecoderShape, LayerWeights, PackedDecoder, why_unsupported
from kernels.linear import PackedLinear
from kernels.native.library import Native
from kernels.native.serving import native
from shared.config import ConfigError
from worker_svc.model.llama_layer import Layer, Linear


def shape_of(config: PretrainedConfig) -> DecoderShape:
    """The sizes that the kernels ask for."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        scale=head_dim**-0.5,
    )


def choose_kernels(
    config: PretrainedConfig, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device, quantization: str
) -> Native | None:
    """The CPU kernels if they can run this model; None: torch must.

    Raises:
        ConfigError: int8 weights are asked for, which only these kernels have.
    """
    if device.type == "cpu":
        reason = why_unsupported(shape_of(config), dtype, kv_dtype)
    else:
        reason = f"this worker computes on {device.type}"
    kernels = native() if reason is None else None
    if quantization != "none" and kernels is None:
        reason = reason or "they were not built, failed their self-test (the log says so), or QUIRE_CPU_KERNELS is off"
        raise ConfigError(
            f"quantization: only the CPU kernels have {quantization}, and they do not serve here: {reason}"
        )
    return kernels


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
) -> PackedDecoder:
    """Packs all weights: in place, or as int8, in which case each layer of `layers` is let go as soon as it is done."""

    def convert(linear: Linear) -> PackedLinear:
        if quantization == "int8":
            return packed_linear.quantise(linear.weight, linear.bias, kernels=kernels)
        return packed_linear.pack(linear.weight, linear.bias, kernels=kernels)

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
                gate_up=convert(layer.gate_up),
                down=convert(layer.down),
                sliding_window=layer.sliding_window,
            )
        )
        del layer
    return PackedDecoder(
        kernels,
        shape,
        packed,
        embedding=embedding,
        final_norm=final_norm,
        head=convert(Linear(head, None)),
        cos=cos,
        sin=sin,
    )
