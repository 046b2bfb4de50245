"""Native CPU kernels for `transformers` layers with recurrent state.

The layers call functions of their module, such as `torch_recurrent_gated_delta_rule`, which is written in plain torch.
`NativeLayers` replaces these functions during a step. The trial at load (`hf_trial`) compares the result with a forward
pass outside of a step, which uses torch. Arguments that the native kernels do not support, such as other dtypes, go to
the replaced function.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from kernels.native.library import Native
from kernels.native.recurrent import convolve_native, delta_rule_native
from kernels.recurrent import supports_convolution, supports_delta_rule

_Function = Callable[..., Any]

_RULE = ("query", "key", "value", "g", "beta")
_CONVOLUTION = ("hidden_states", "conv_state", "weight", "bias", "activation")


class NativeLayers:
    """Context manager in which a decoder's layers with recurrent state use the native kernels."""

    def __init__(self, decoder: PreTrainedModel, kernels: Native) -> None:
        modules = {type(module).__module__ for module in decoder.modules()}
        self._replaced: list[tuple[ModuleType, str, _Function, _Function]] = []
        for module in (sys.modules[name] for name in sorted(modules) if name.startswith("transformers.models.")):
            for name, (make, parameters) in _REPLACEMENTS.items():
                function = getattr(module, name, None)
                if (
                    function is not None
                    and tuple(inspect.signature(function).parameters)[: len(parameters)] == parameters
                ):
                    self._replaced.append((module, name, function, make(function, kernels)))

    def __enter__(self) -> None:
        for module, name, _function, replacement in self._replaced:
            setattr(module, name, replacement)

    def __exit__(self, *_: object) -> None:
        for module, name, function, _replacement in self._replaced:
            setattr(module, name, function)


def _delta_rule(function: _Function, kernels: Native) -> _Function:
    def delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *args: Any,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if args or cu_seqlens is not None or not supports_delta_rule(query, key, value, g, initial_state):
            return function(  # type: ignore[no-any-return]
                *(query, key, value, g, beta, *args),
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens,
                **kwargs,
            )
        if initial_state is None:
            state = torch.zeros(len(value), value.shape[2], key.shape[3], value.shape[3])
        else:
            # The layer replaces the state in its cache by the returned one, so it may be updated in place.
            state = initial_state.contiguous()
        out = delta_rule_native(query, key, value, g, beta, state, normalise=use_qk_l2norm_in_kernel, kernels=kernels)
        return out, state if output_final_state else None

    return delta_rule


def _convolution(function: _Function, kernels: Native) -> _Function:
    def convolution(
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        if (
            hidden_states.shape[2] != 1
            or activation not in (None, "silu", "swish")
            or not supports_convolution(hidden_states, conv_state, weight)
        ):
            return function(hidden_states, conv_state, weight, bias, activation)  # type: ignore[no-any-return]
        silu = activation is not None
        out = convolve_native(hidden_states.squeeze(2), conv_state, weight, bias, silu=silu, kernels=kernels)
        return out.unsqueeze(2)

    return convolution


_REPLACEMENTS: dict[str, tuple[Callable[[_Function, Native], _Function], tuple[str, ...]]] = {
    "torch_recurrent_gated_delta_rule": (_delta_rule, _RULE),
    "torch_chunk_gated_delta_rule": (_delta_rule, _RULE),
    "causal_conv1d_update": (_convolution, _CONVOLUTION),
}
"""Functions of `transformers`, with what replaces them and the parameters that must come first."""
