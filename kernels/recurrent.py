"""Layers with recurrent state on a CPU: the gated delta rule, the selective scan of Mamba 2, and causal convolutions.

**Gated delta rule** (Yang et al., 2024). Each head of values has a state S ``[key_dim, value_dim]``. A token with
query q, key k, value v, gate g and beta changes the state and reads it::

    S = exp(g) · S
    S = S + k ⊗ (beta · (v - k S))
    out = q S / sqrt(key_dim)

With ``normalise``, q and k are first divided by their length. Each head of keys and queries serves the same number of
consecutive heads of values. The state and all sums are float32.

**Selective scan** (Mamba 2; Dao and Gu, 2024). Each head has a state S ``[head_dim, state_dim]``. A token with input x,
vectors b and c, and step d changes the state and reads it::

    S = exp(d · decay) · S + d · x ⊗ b
    out = S c + skip · x

Each pair b, c serves the same number of consecutive heads. The state and all sums are float32.

**Causal convolution.** Each channel has the newest inputs as its state. A token's input replaces the oldest one, and
the output is the sum of the inputs times the channel's weights, plus the bias. The sum is float32. It is rounded to
the input's type before the activation, as in torch.

The native kernels compute a row's tokens one after the other, each in one pass over the state. They update states in
place. With ``places``, the state of row r is that at ``places[r]``, which must differ between rows.
"""

from __future__ import annotations

import torch

from kernels.native.structures import FORMATS

__all__ = [
    "convolve_reference",
    "convolve_tokens_reference",
    "delta_rule_reference",
    "selective_scan_reference",
    "supports_convolution",
    "supports_delta_rule",
    "supports_selective_scan",
]


def supports_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gate: torch.Tensor, state: torch.Tensor | None
) -> bool:
    """Return whether the native kernels support the devices, dtypes and sizes of these arguments of the delta rule."""
    return (
        query.dtype in FORMATS
        and key.dtype == query.dtype
        and value.dtype == query.dtype
        and gate.dtype == torch.float32
        and key.shape[2] > 0
        and value.shape[2] % key.shape[2] == 0
        and 0 not in value.shape
        and (state is None or state.dtype == torch.float32)
        and all(x.device.type == "cpu" for x in (query, key, value, gate, *([] if state is None else [state])))
    )


def supports_selective_scan(
    x: torch.Tensor, write: torch.Tensor, read: torch.Tensor, state: torch.Tensor | None
) -> bool:
    """Return whether the native kernels support the devices, dtypes and sizes of these arguments of the scan."""
    return (
        x.dtype in FORMATS
        and write.dtype == x.dtype
        and read.dtype == x.dtype
        and write.shape[-2] > 0
        and x.shape[-2] % write.shape[-2] == 0
        and (state is None or state.dtype == torch.float32)
        and all(each.device.type == "cpu" for each in (x, write, read, *([] if state is None else [state])))
    )


def supports_convolution(x: torch.Tensor, state: torch.Tensor | None, weight: torch.Tensor) -> bool:
    """Return whether the native kernels support the devices, dtypes and sizes of these arguments.

    Args:
        x: the inputs.
        state: the state; None if it is part of ``x``.
        weight: ``[channels, width]``.
    """
    return (
        x.dtype in FORMATS
        and weight.dtype == x.dtype
        and (state is None or (state.dtype == x.dtype and state.shape[-1] == weight.shape[-1]))
        and all(each.device.type == "cpu" for each in (x, weight, *([] if state is None else [state])))
    )


def delta_rule_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    normalise: bool,
) -> torch.Tensor:
    """Compute the gated delta rule in the dtype of ``state``, which is updated in place.

    Args:
        query: ``[rows, tokens, key_heads, key_dim]``.
        key: ``[rows, tokens, key_heads, key_dim]``.
        value: ``[rows, tokens, value_heads, value_dim]``.
        gate: ``[rows, tokens, value_heads]``, logarithms of the decay.
        beta: ``[rows, tokens, value_heads]``.
        state: ``[rows, value_heads, key_dim, value_dim]``.
        normalise: divide queries and keys by their length.

    Returns:
        The output in the dtype of ``state``, ``[rows, tokens, value_heads, value_dim]``.
    """
    group = value.shape[2] // key.shape[2]
    query, key = (x.to(state.dtype).repeat_interleave(group, dim=2) for x in (query, key))
    if normalise:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    out = torch.empty(value.shape, dtype=state.dtype)
    for token in range(value.shape[1]):
        state *= gate[:, token, :, None, None].to(state.dtype).exp()
        error = value[:, token].to(state.dtype) - torch.einsum("rhk,rhkv->rhv", key[:, token], state)
        change = beta[:, token, :, None].to(state.dtype) * error
        state += key[:, token, :, :, None] * change[:, :, None]
        out[:, token] = torch.einsum("rhk,rhkv->rhv", query[:, token], state)
    return out


def selective_scan_reference(
    x: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Compute the selective scan in the dtype of ``state``, which is updated in place.

    Args:
        x: ``[rows, tokens, heads, head_dim]``.
        write: b, ``[rows, tokens, groups, state_dim]``.
        read: c, ``[rows, tokens, groups, state_dim]``.
        step: ``[rows, tokens, heads]``.
        decay: ``[heads]``, negative.
        skip: ``[heads]``.
        state: ``[rows, heads, head_dim, state_dim]``.

    Returns:
        The output in the dtype of ``state``, ``[rows, tokens, heads, head_dim]``.
    """
    group = x.shape[2] // write.shape[2]
    x, step, decay, skip = (each.to(state.dtype) for each in (x, step, decay, skip))
    write, read = (each.to(state.dtype).repeat_interleave(group, dim=2) for each in (write, read))
    out = torch.empty(x.shape, dtype=state.dtype)
    for token in range(x.shape[1]):
        now = step[:, token, :, None, None]
        state *= (now * decay[:, None, None]).exp()
        state += now * x[:, token, :, :, None] * write[:, token, :, None, :]
        out[:, token] = torch.einsum("rhpn,rhn->rhp", state, read[:, token]) + skip[:, None] * x[:, token]
    return out


def convolve_reference(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool
) -> torch.Tensor:
    """Compute a causal convolution of one token per row, in the dtype of ``x``.

    Args:
        x: ``[rows, channels]``.
        state: ``[rows, channels, width]``, the newest inputs, oldest first; updated in place.
        weight: ``[channels, width]``.
        bias: ``[channels]``, or None.
        silu: apply the activation silu.

    Returns:
        ``[rows, channels]``.
    """
    state.copy_(torch.cat([state[:, :, 1:], x[:, :, None]], dim=-1))
    total = (state.to(torch.promote_types(x.dtype, torch.float32)) * weight).sum(-1)
    out = (total if bias is None else total + bias).to(x.dtype)
    return torch.nn.functional.silu(out) if silu else out


def convolve_tokens_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool
) -> torch.Tensor:
    """Compute a causal convolution of all tokens, in the dtype of ``x``; tokens before the first count as 0.

    Args:
        x: ``[rows, tokens, channels]``.
        weight: ``[channels, width]``.
        bias: ``[channels]``, or None.
        silu: apply the activation silu.

    Returns:
        ``[rows, tokens, channels]``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    tokens, width = x.shape[1], weight.shape[1]
    padded = torch.nn.functional.pad(x.to(wide), (0, 0, width - 1, 0))
    total = torch.zeros_like(x, dtype=wide)
    for i in range(width):
        total += padded[:, i : i + tokens] * weight[:, i].to(wide)
    out = (total if bias is None else total + bias.to(wide)).to(x.dtype)
    return torch.nn.functional.silu(out) if silu else out
