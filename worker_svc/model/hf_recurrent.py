"""Native CPU kernels for `transformers` layers with recurrent state.

The layers call functions of their module, such as `torch_recurrent_gated_delta_rule`, which is written in plain torch.
`NativeLayers` replaces these functions during a step. The trial at load (`hf_trial`) compares the result with a forward
pass outside of a step, which uses torch. Arguments that the native kernels do not support, such as other dtypes, go to
the replaced function.

The kernels update the states of a batch in place, wherever its rows are. For rows that do not follow each other, a
layer receives a *stand-in*: a tensor of the right shape without memory, with the states and places as attributes. Only
the replacements can use it. Every other operation reads NaN or fails, which the trial detects.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import softplus
from transformers import PreTrainedModel

from kernels.native.library import Native
from kernels.native.recurrent import (
    convolve_native,
    convolve_tokens_native,
    delta_rule_native,
    selective_scan_native,
)
from kernels.recurrent import supports_convolution, supports_delta_rule, supports_selective_scan

_Function = Callable[..., Any]

_RULE = ("query", "key", "value", "g", "beta")
_CONVOLUTION = ("hidden_states", "conv_state", "weight", "bias", "activation")
_TOKENS = ("hidden_states", "weight", "bias", "activation")
_STEP = ("state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z")
_SCAN = ("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus")


class NativeLayers:
    """Context manager in which a decoder's layers with recurrent state use the native kernels."""

    def __init__(self, decoder: PreTrainedModel, kernels: Native) -> None:
        self._replaced: list[tuple[ModuleType, str, _Function, _Function]] = [
            (module, name, function, _REPLACEMENTS[name][0](function, kernels))
            for module, name, function in _replaceable(decoder)
        ]
        names = {name for _, name, _, _ in self._replaced}
        self.replaces_convolutions = "causal_conv1d_update" in names
        """Whether decode steps pass the states of convolutions to a replacement."""
        self.replaces_recurrences = not _RECURRENCES.isdisjoint(names)
        """Whether decode steps pass the other states to a replacement."""

    def __enter__(self) -> None:
        for module, name, _function, replacement in self._replaced:
            setattr(module, name, replacement)

    def __exit__(self, *_: object) -> None:
        for module, name, function, _replacement in self._replaced:
            setattr(module, name, function)


def _replaceable(decoder: PreTrainedModel) -> Iterator[tuple[ModuleType, str, _Function]]:
    """Yield the functions that a decoder's layers call and that native kernels replace, with module and name."""
    modules = {type(module).__module__ for module in decoder.modules()}
    for module in (sys.modules[name] for name in sorted(modules) if name.startswith("transformers.models.")):
        for name, (_, parameters) in _REPLACEMENTS.items():
            function = getattr(module, name, None)
            if function is not None and tuple(inspect.signature(function).parameters)[: len(parameters)] == parameters:
                yield module, name, function


@contextmanager
def without_torch_warnings(decoder: PreTrainedModel) -> Iterator[None]:
    """Suppress the warnings that functions run in torch, for functions that native kernels replace in each step.

    `transformers` warns once per function, at the first call, that a package for GPUs is not installed. Only forward
    passes outside of a step, such as those of the trial at load, make such calls.
    """
    suppressed = tuple({f"`{_PACKAGED[name]}` is falling back" for _, name, _ in _replaceable(decoder)})

    def is_kept(record: logging.LogRecord) -> bool:
        return not (suppressed and record.getMessage().startswith(suppressed))

    logger = logging.getLogger(_WARNER)
    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


def stand_in(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return a tensor that represents `states[places]` for the replacements.

    Args:
        states: `[states, *shape]`.
        places: `[rows] int64`, on the CPU.
    """
    tensor = states.new_full((), torch.nan).expand(len(places), *states.shape[1:])
    tensor.states, tensor.places = states, places  # type: ignore[attr-defined]
    return tensor


def is_stand_in(state: torch.Tensor) -> bool:
    """Return whether a tensor is from `stand_in`."""
    return getattr(state, "places", None) is not None


def store_in(state: torch.Tensor, new: torch.Tensor) -> None:
    """Write `new` to the states that a tensor from `stand_in` represents."""
    state.states.index_copy_(0, state.places, new.to(state.dtype))  # type: ignore[attr-defined]


def _opened(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return contiguous states for a kernel that updates them in place, and the rows' places in them."""
    if is_stand_in(state):
        return state.states, state.places  # type: ignore[attr-defined]
    # The layer replaces its state by the returned one, so a copy of a state with another layout may be updated too.
    return state.contiguous(), None


def _copied(state: torch.Tensor | None) -> torch.Tensor | None:
    """Return a state for a function of `transformers`: a copy of a stand-in's states, else the state itself."""
    if state is None or not is_stand_in(state):
        return state
    return state.states.index_select(0, state.places)  # type: ignore[attr-defined, no-any-return]


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
                initial_state=_copied(initial_state),
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens,
                **kwargs,
            )
        if initial_state is None:
            initial_state = torch.zeros(len(value), value.shape[2], key.shape[3], value.shape[3])
        state, places = _opened(initial_state)
        out = delta_rule_native(
            *(query, key, value, g, beta, state), places=places, normalise=use_qk_l2norm_in_kernel, kernels=kernels
        )
        return out, (state if places is None else initial_state) if output_final_state else None

    return delta_rule


def _selective_step(function: _Function, kernels: Native) -> _Function:
    def selective_step(
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803 (name in transformers)
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        per_head = [dt, *([] if D is None else [D]), *([] if dt_bias is None else [dt_bias])]
        if (
            z is not None
            or not supports_selective_scan(hidden_states, B, C, state)
            or not (is_stand_in(state) or state.is_contiguous())
            or any(each.stride(-1) != 0 for each in per_head)
            or A.stride()[-2:] != (0, 0)
        ):
            copied = _copied(state)
            out = function(copied, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **kwargs)
            if copied is not state:
                assert copied is not None
                store_in(state, copied)
            return out  # type: ignore[no-any-return]
        step = _steps(dt[..., 0], None if dt_bias is None else dt_bias[..., 0], dt_softplus)
        skip = torch.zeros(hidden_states.shape[1]) if D is None else D[..., 0]
        opened, places = _opened(state)
        return selective_scan_native(
            *(hidden_states[:, None], B[:, None], C[:, None], step[:, None], A[..., 0, 0], skip, opened),
            places=places,
            kernels=kernels,
        )[:, 0]

    return selective_step


def _selective_scan(function: _Function, kernels: Native) -> _Function:
    def selective_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803 (name in transformers)
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        chunk_size: int,
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        if (
            kwargs.get("z") is not None
            or kwargs.get("seq_idx") is not None
            or not supports_selective_scan(hidden_states, B, C, initial_states)
            or A.dim() != 1
        ):
            return function(
                *(hidden_states, dt, A, B, C, chunk_size, D, dt_bias, _copied(initial_states), dt_softplus),
                dt_limit=dt_limit,
                return_final_states=return_final_states,
                **kwargs,
            )
        rows, _, heads, head_dim = hidden_states.shape
        if initial_states is None:
            initial_states = torch.zeros(rows, heads, head_dim, B.shape[3])
        state, places = _opened(initial_states)
        out = selective_scan_native(
            *(hidden_states, B, C, _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit), A),
            *(torch.zeros(heads) if D is None else D, state),
            places=places,
            out_dtype=torch.float32,
            kernels=kernels,
        )
        return (out, state if places is None else initial_states) if return_final_states else out

    return selective_scan


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, use_softplus: bool) -> torch.Tensor:
    """Return the steps as `transformers` computes them, in the dtype of `dt`."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return softplus(dt) if use_softplus else dt


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
            or activation not in _ACTIVATIONS
            or not supports_convolution(hidden_states, conv_state, weight)
            or not (is_stand_in(conv_state) or conv_state.is_contiguous())
        ):
            copied = _copied(conv_state)
            out = function(hidden_states, copied, weight, bias, activation)
            if copied is not conv_state:
                assert copied is not None
                store_in(conv_state, copied)
            return out  # type: ignore[no-any-return]
        state, places = _opened(conv_state)
        silu = activation is not None
        return convolve_native(
            *(hidden_states.squeeze(2), state, weight, bias), places=places, silu=silu, kernels=kernels
        ).unsqueeze(2)

    return convolution


def _token_convolution(function: _Function, kernels: Native) -> _Function:
    def convolution(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if (
            kwargs.get("seq_idx") is not None
            or activation not in _ACTIVATIONS
            or not supports_convolution(hidden_states, None, weight)
        ):
            return function(hidden_states, weight, bias, activation, **kwargs)  # type: ignore[no-any-return]
        silu = activation is not None
        return convolve_tokens_native(
            hidden_states.transpose(1, 2), weight, bias, silu=silu, kernels=kernels
        ).transpose(1, 2)

    return convolution


_ACTIVATIONS = (None, "silu", "swish")
_RECURRENCES = {"torch_recurrent_gated_delta_rule", "mamba2_selective_state_update"}

_REPLACEMENTS: dict[str, tuple[Callable[[_Function, Native], _Function], tuple[str, ...]]] = {
    "torch_recurrent_gated_delta_rule": (_delta_rule, _RULE),
    "torch_chunk_gated_delta_rule": (_delta_rule, _RULE),
    "mamba2_selective_state_update": (_selective_step, _STEP),
    "mamba2_chunk_scan": (_selective_scan, _SCAN),
    "causal_conv1d_update": (_convolution, _CONVOLUTION),
    "causal_conv1d_fn": (_token_convolution, _TOKENS),
}
"""Functions of `transformers`, with what replaces them and the parameters that must come first."""
_PACKAGED = {
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "mamba2_selective_state_update": "selective_state_update",
    "mamba2_chunk_scan": "mamba_chunk_scan_combined",
    "causal_conv1d_update": "causal_conv1d_update",
    "causal_conv1d_fn": "causal_conv1d_fn",
}
"""The same functions, with the names that they have in packages for GPUs and in the warnings of `transformers`."""
_WARNER = "transformers.integrations.hub_kernels"
"""Logger of these warnings."""
