"""Quantised weights for `transformers` decoders on a CPU: linear layers use the packed products in `kernels`.

Modules with linear layers are replaced after the trial in `hf`, which checks the decoder itself. `hf` then computes the
trial's rows again. The LM head has int8 weights for both kinds, as in `llama_packed`, and keeps its type if it is also
the embedding. Mixture routers, shared-expert gates, and experts that a class stores in one tensor keep their type.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kernels.linear import PackedLinear, quantise, quantise_int4
from kernels.native.library import Native
from kernels.native.serving import native
from kernels.native.structures import FORMATS
from shared.config import ConfigError
from shared.logging import get_logger

_ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Name parts of layers that choose or weight experts, such as "mlp.gate" and "mlp.router.layer"."""


class PackedModule(torch.nn.Module):
    """Linear layer over packed weights."""

    def __init__(self, linear: PackedLinear, kernels: Native) -> None:
        super().__init__()
        self._linear = linear
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `x` `[..., inputs]`."""
        rows = self._linear(x.reshape(-1, x.shape[-1]), self._kernels)
        return rows.view(*x.shape[:-1], self._linear.outputs)


def choose_kernels(device: torch.device, dtype: torch.dtype, quantization: str) -> Native:
    """Return the native CPU kernels.

    Raises:
        ConfigError: they are not available for this device or type.
    """
    kernels = native() if device.type == "cpu" and dtype in FORMATS else None
    if kernels is None:
        reason = (
            f"the device is {device.type}"
            if device.type != "cpu"
            else f"they support float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
            if dtype not in FORMATS
            else "they are not built, failed their self-test (see the log), or are off (QUIRE_CPU_KERNELS)"
        )
        raise ConfigError(
            f"quantization: {quantization} needs the native CPU kernels, which are not available: {reason}; use none"
        )
    return kernels


def pack(decoder: PreTrainedModel, quantization: str, kernels: Native) -> None:
    """Replace the linear layers of a decoder by packed ones, in place."""
    head: Any = decoder.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding = decoder.get_input_embeddings()
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    num_packed = 0
    for path, parent in list(decoder.named_modules()):
        for name, module in list(parent.named_children()):
            if not _ROUTERS.isdisjoint((*path.split("."), name)) or (module is head and tied):
                continue
            # Skip subclasses, because they may compute something other than a product.
            if type(module) is torch.nn.Linear:
                weight = module.weight
            elif type(module) is Conv1D:  # This is GPT-2's linear layer, which stores the transposed weight.
                weight = module.weight.t().contiguous()
            else:
                continue
            convert = quantise_int4 if quantization == "int4" and module is not head else quantise
            setattr(parent, name, PackedModule(convert(weight.contiguous(), module.bias, kernels=kernels), kernels))
            num_packed += 1
    get_logger().info("weights: linear layers quantised", quantization=quantization, layers=num_packed)
