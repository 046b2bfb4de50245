"""Packed weights for `transformers` decoders on a CPU: linear layers use the products in `kernels`.

Modules with linear layers are replaced after the trial in `hf`, which checks the decoder itself.

* `pack_unquantised` packs bfloat16 weights, whose products then take less time than those of torch. A first pass shows
  which classes use the weight of a layer themselves. These layers stay.
* `quantise_layers` packs int8 or int4 weights. `hf` then computes the trial's rows again. The LM head has int8 weights
  for both kinds, as in `llama_packed`, and keeps its type if it is also the embedding.

Mixture routers, shared-expert gates, and experts that a class stores in one tensor are not packed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import embedding, linear
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kernels.linear import PackedLinear, empty_weight, pack, quantise, quantise_int4, unpacked_rows
from kernels.native.library import Native
from kernels.native.serving import native
from kernels.native.structures import FORMATS
from shared.config import ConfigError
from shared.logging import get_logger

_ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Name parts of layers that choose or weight experts, such as "mlp.gate" and "mlp.router.layer"."""


class _Weight:
    """Weight of a layer as its class may see it: dtype, device and shape, and the values until they are packed."""

    def __init__(self, values: torch.Tensor) -> None:
        self.dtype, self.device, self.shape = values.dtype, values.device, values.shape
        self.values: torch.Tensor | None = values
        self.used = False
        """Whether the class used the values."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._use(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(lambda each: each._use() if isinstance(each, cls) else each, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _use(self) -> torch.Tensor:
        if self.values is None:
            raise TypeError("the class computes with a weight that is packed")
        self.used = True
        return self.values


class PackedModule(torch.nn.Module):
    """Linear layer over packed weights; before `pack`, over the weights of the replaced layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Native) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = _Weight(weight)
        self.bias = bias
        self._linear: PackedLinear | None = None
        self._kernels = kernels

    def pack(self, packed: PackedLinear) -> None:
        """Use these weights, and release those of the replaced layer."""
        self._linear = packed
        self.weight.values = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `x` `[..., inputs]`."""
        if self._linear is None:
            assert self.weight.values is not None
            return linear(x, self.weight.values, self.bias)
        rows = self._linear(x.reshape(-1, x.shape[-1]), self._kernels)
        return rows.view(*x.shape[:-1], self._linear.outputs)


class _PackedEmbedding(torch.nn.Embedding):
    """Embedding whose weight is that of a packed LM head.

    It replaces `torch.nn.Embedding` among the bases of an embedding's class, which may scale the result.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows for token IDs."""
        head: PackedModule = vars(self)["packed_head"]
        if head._linear is None:
            assert head.weight.values is not None
            return embedding(input, head.weight.values)
        return unpacked_rows(head._linear, input, head.weight.dtype)


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


def pack_unquantised(decoder: PreTrainedModel, kernels: Native, compute: Callable[[], object]) -> None:
    """Replace the bfloat16 linear layers of a decoder by packed ones, in place, and so the LM head if it is tied.

    Args:
        decoder: the decoder.
        kernels: the native CPU kernels.
        compute: computes steps of the decoder, to find out which weights its classes use themselves.
    """
    tied = _tied_embedding(decoder)
    kept: dict[PackedModule, tuple[torch.nn.Module, str, torch.nn.Module]] = {}
    for parent, name, module in _layers(decoder):
        if type(module) is torch.nn.Linear and module.weight.dtype == torch.bfloat16:
            layer = PackedModule(module.weight, module.bias, kernels)
            kept[layer] = parent, name, module
            setattr(parent, name, layer)
    head: Any = decoder.get_output_embeddings()  # type: ignore[no-untyped-call]
    own_class: Any = type(tied)
    if tied is not None and head in kept:
        _tie(tied, head)
    try:
        compute()
    except Exception:  # A class that cannot compute with such layers keeps its own.
        for layer in kept:
            layer.weight.used = True
    if tied is not None and type(tied) is not own_class and head.weight.used:
        del vars(tied)["weight"], vars(tied)["packed_head"]
        tied.__class__ = own_class
        tied.weight = kept[head][2].weight  # type: ignore[assignment]
    packed: dict[tuple[int, ...], PackedLinear] = {}
    for layer in tuple(kept):  # Without the replaced modules, so that each of them is released at once.
        parent, name, module = kept[layer]
        weight = layer.weight.values
        assert weight is not None
        if layer.weight.used:
            setattr(parent, name, module)
            continue
        key = (weight.data_ptr(), *weight.shape, 0 if layer.bias is None else layer.bias.data_ptr())
        if key not in packed:  # Layers may share their weights.
            packed[key] = _packed_copy(weight, layer.bias, kernels)
        layer.pack(packed[key])
        del kept[layer], module, weight
    get_logger().info("weights: linear layers packed", layers=len(packed), not_packed=len(kept))


def _packed_copy(weight: torch.Tensor, bias: torch.Tensor | None, kernels: Native) -> PackedLinear:
    copy = empty_weight(weight.shape[0], weight.shape[1], weight.dtype)
    copy.copy_(weight)
    return pack(copy, bias, kernels=kernels)


def _tie(tied: torch.nn.Embedding, head: PackedModule) -> None:
    """Make an embedding read its rows from the LM head."""
    kind = type(tied)
    bases = (_PackedEmbedding,) if kind is torch.nn.Embedding else (kind, _PackedEmbedding)
    del tied.weight
    vars(tied).update(weight=head.weight, packed_head=head)
    tied.__class__ = type(kind.__name__, bases, {})


def _tied_embedding(decoder: PreTrainedModel) -> torch.nn.Embedding | None:
    """Return the decoder's embedding if it shares its weight with the LM head; None if not."""
    head: Any = decoder.get_output_embeddings()  # type: ignore[no-untyped-call]
    found: Any = decoder.get_input_embeddings()
    tied = head is not None and found is not None and head.weight is found.weight
    return found if tied and isinstance(found, torch.nn.Embedding) and found.max_norm is None else None


def quantise_layers(decoder: PreTrainedModel, quantization: str, kernels: Native) -> None:
    """Replace the linear layers of a decoder by quantised ones, in place."""
    head: Any = decoder.get_output_embeddings()  # type: ignore[no-untyped-call]
    found: Any = decoder.get_input_embeddings()
    tied = head is not None and found is not None and head.weight is found.weight
    num_packed = 0
    for parent, name, module in _layers(decoder):
        if module is head and tied:
            continue
        # Skip subclasses, because they may compute something other than a product.
        if type(module) is torch.nn.Linear:
            weight = module.weight
        elif type(module) is Conv1D:  # This is GPT-2's linear layer, which stores the transposed weight.
            weight = module.weight.t().contiguous()
        else:
            continue
        convert = quantise_int4 if quantization == "int4" and module is not head else quantise
        layer = PackedModule(weight, module.bias, kernels)
        layer.pack(convert(weight.contiguous(), module.bias, kernels=kernels))
        setattr(parent, name, layer)
        num_packed += 1
    get_logger().info("weights: linear layers quantised", quantization=quantization, layers=num_packed)


def _layers(decoder: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Yield the modules that are no routers, each with its parent and its name there."""
    for path, parent in list(decoder.named_modules()):
        for name, module in list(parent.named_children()):
            if _ROUTERS.isdisjoint((*path.split("."), name)):
                yield parent, name, module
