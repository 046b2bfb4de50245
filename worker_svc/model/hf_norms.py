"""RMSNorm modules of `transformers` decoders on a CPU, computed by one native kernel instead of seven torch operations.

Classes define these modules again and again, and round differently. A module is therefore recognised by its results: it
is called with random vectors, and the native kernel must return the same, except for the order of summation.
"""

import inspect
from collections.abc import Callable, Iterator

import torch

from kernels.native.library import Native
from kernels.native.norm import LANES, rms_norm_native
from kernels.native.structures import FORMATS

_SCALES = (1e-4, 1e-2, 0.3, 1.0, 3.0, 1e2)
"""Sizes of the random vectors: small ones show where eps is added."""
_DIFFERENT = {torch.bfloat16: 0.02, torch.float32: 0.7}
"""Maximum share of elements that the order of summation may change, each by one or a few units in the last place."""
_UNITS = {torch.bfloat16: 1, torch.float32: 8}
"""Maximum difference of an element in units in the last place."""
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


class NativeNorm:
    """The forward pass of an RMSNorm module with the native kernel."""

    def __init__(
        self, weight: torch.Tensor, eps: float, *, rounds_twice: bool, dtype: torch.dtype, kernels: Native
    ) -> None:
        """Hold the parameters; `weight` `[dim]` is float32 with its offset added."""
        self._weight, self._eps, self._rounds_twice = weight, eps, rounds_twice
        self._dtype, self._kernels = dtype, kernels
        self.otherwise: Callable[[torch.Tensor], torch.Tensor] | None = None
        """The module's own forward pass, for vectors with another dtype."""

    def __call__(self, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Return the norm of the only argument `[..., dim]`, which may have any name, in its dtype."""
        (x,) = args or named.values()
        if x.dtype != self._dtype and self.otherwise is not None:
            return self.otherwise(x)
        return rms_norm_native(x, self._weight, self._eps, rounds_twice=self._rounds_twice, kernels=self._kernels)


def use_native_norms(decoder: torch.nn.Module, dtype: torch.dtype, kernels: Native) -> int:
    """Replace the forward pass of each RMSNorm module whose results the native kernel returns; return their number."""
    if dtype not in FORMATS:
        return 0
    generator = torch.Generator().manual_seed(0)
    count = 0
    for module in decoder.modules():
        norm = _same(module, dtype, kernels, generator)
        if norm is not None:
            norm.otherwise = module.forward
            module.forward = norm
            count += 1
    return count


def _same(
    module: torch.nn.Module, dtype: torch.dtype, kernels: Native, generator: torch.Generator
) -> NativeNorm | None:
    """Return the native form of a module; None if it is no RMSNorm."""
    weight, eps = _parameters(module)
    if weight is None or len(inspect.signature(module.forward).parameters) != 1:
        return None
    vectors = torch.randn(len(_SCALES), 2, len(weight), generator=generator)
    x = (vectors * torch.tensor(_SCALES)[:, None, None]).to(dtype)
    try:
        expected = module(x)
    except Exception:  # A module of another kind, which expects other inputs.
        return None
    if not isinstance(expected, torch.Tensor) or expected.dtype != dtype or expected.shape != x.shape:
        return None
    for norm in _forms(weight, eps, dtype, kernels):
        if _are_alike(norm(x), expected):
            return norm
    return None


def _parameters(module: torch.nn.Module) -> tuple[torch.Tensor | None, float]:
    """Return weight `[dim]` and epsilon of a module that may be an RMSNorm; None if it has other parameters."""
    own = list(module.parameters())
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if len(own) != 1 or own[0] is not weight or weight.dim() != 1 or len(weight) % LANES or not isinstance(eps, float):
        return None, 0.0
    return weight.detach(), eps


def _forms(weight: torch.Tensor, eps: float, dtype: torch.dtype, kernels: Native) -> Iterator[NativeNorm]:
    """Yield the forms of RMSNorm in `transformers`: with and without an offset of the weight, rounded once or twice."""
    wide = weight.float().contiguous()
    for factors in (wide, 1.0 + wide):
        for rounds_twice in (True, False):
            yield NativeNorm(factors, eps, rounds_twice=rounds_twice, dtype=dtype, kernels=kernels)


def _are_alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two results differ only by the order of summation."""
    bits = _BITS[found.dtype]
    units = (found.view(bits).long() - expected.contiguous().view(bits).long()).abs()
    different = (units > 0).float().mean().item()
    return different <= _DIFFERENT[found.dtype] and int(units.max()) <= _UNITS[found.dtype]
