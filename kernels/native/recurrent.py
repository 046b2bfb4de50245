"""Layers with recurrent state, with the native CPU kernels; `kernels.recurrent` defines and checks the arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.native.library import Native
from kernels.native.structures import (
    FORMATS,
    CConvolution,
    CDeltaRule,
    CSelectiveScan,
    CTokenConvolution,
)


def delta_rule_native(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    normalise: bool,
    kernels: Native,
) -> torch.Tensor:
    """Compute `kernels.recurrent.delta_rule_reference` in float32; return the output in the dtype of ``query``.

    ``state`` is updated in place. ``places`` ``[rows]`` int64 are the places of the rows in it; None: 0, 1, 2 ...

    Raises:
        ValueError: ``state`` or ``places`` has another layout.
    """
    rows, tokens, value_heads, value_dim = value.shape
    _check_state(state, (value_heads, key.shape[3], value_dim), torch.float32, rows, places)
    query, key, value = map(_with_contiguous_tokens, (query, key, value))
    gate, beta = gate.contiguous(), beta.float().contiguous()
    out = torch.empty(rows, tokens, value_heads, value_dim, dtype=query.dtype)
    kernels.delta_rule(
        CDeltaRule(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            query_stride=_token_stride(query),
            key_stride=_token_stride(key),
            value_stride=_token_stride(value),
            gate=gate.data_ptr(),
            beta=beta.data_ptr(),
            out=out.data_ptr(),
            state=state.data_ptr(),
            places=None if places is None else places.data_ptr(),
            format=FORMATS[query.dtype],
            normalise=int(normalise),
            rows=rows,
            tokens=tokens,
            key_heads=key.shape[2],
            value_heads=value_heads,
            key_dim=key.shape[3],
            value_dim=value_dim,
        )
    )
    return out


def selective_scan_native(
    x: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernels: Native,
) -> torch.Tensor:
    """Compute `kernels.recurrent.selective_scan_reference` in float32.

    ``state`` is updated in place. ``places`` ``[rows]`` int64 are the places of the rows in it; None: 0, 1, 2 ...

    Returns:
        The output in ``out_dtype``, by default the dtype of ``x``.

    Raises:
        ValueError: ``state`` or ``places`` has another layout.
    """
    rows, tokens, heads, head_dim = x.shape
    groups, state_dim = write.shape[2:]
    _check_state(state, (heads, head_dim, state_dim), torch.float32, rows, places)
    x, write, read = map(_with_contiguous_tokens, (x, write, read))
    step, decay, skip = (each.float().contiguous() for each in (step, decay, skip))
    out = torch.empty(rows, tokens, heads, head_dim, dtype=out_dtype or x.dtype)
    kernels.selective_scan(
        CSelectiveScan(
            x=x.data_ptr(),
            write=write.data_ptr(),
            read=read.data_ptr(),
            x_stride=_token_stride(x),
            write_stride=_token_stride(write),
            read_stride=_token_stride(read),
            step=step.data_ptr(),
            decay=decay.data_ptr(),
            skip=skip.data_ptr(),
            out=out.data_ptr(),
            state=state.data_ptr(),
            places=None if places is None else places.data_ptr(),
            format=FORMATS[x.dtype],
            out_format=FORMATS[out.dtype],
            rows=rows,
            tokens=tokens,
            heads=heads,
            groups=groups,
            head_dim=head_dim,
            state_dim=state_dim,
        )
    )
    return out


def _with_contiguous_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[rows, tokens, heads, width]`` with one stride between all tokens, and dense tokens."""
    rows, tokens, heads, width = x.shape
    dense = (x.stride(3) == 1 or width == 1) and (x.stride(2) == width or heads == 1)
    even = rows == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1)
    return x if dense and even else x.contiguous()


def _token_stride(x: torch.Tensor) -> int:
    """Return the elements between consecutive tokens of ``x``, from `_with_contiguous_tokens`."""
    return x.stride(0 if x.shape[1] == 1 else 1)


def _check_state(
    state: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, rows: int, places: torch.Tensor | None
) -> None:
    if not state.is_contiguous() or state.dtype != dtype or tuple(state.shape[1:]) != tuple(shape):
        raise ValueError(
            f"state: {list(state.shape)} {state.dtype} with strides {state.stride()} is not a contiguous"
            f" [states, {', '.join(map(str, shape))}] {dtype}; pass one"
        )
    if places is None:
        if len(state) != rows:
            raise ValueError(f"state: it has {len(state)} states for {rows} rows; pass one per row, or `places`")
    elif places.dtype != torch.int64 or places.shape != (rows,) or not places.is_contiguous():
        raise ValueError(f"places: {list(places.shape)} {places.dtype} is not a contiguous [{rows}] int64; pass one")


def convolve_native(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    places: torch.Tensor | None = None,
    silu: bool,
    kernels: Native,
) -> torch.Tensor:
    """Compute `kernels.recurrent.convolve_reference`; ``state`` is updated in place.

    ``places`` ``[rows]`` int64 are the places of the rows in ``state``; None: 0, 1, 2 ...

    Raises:
        ValueError: ``state`` or ``places`` has another layout.
    """
    rows, channels = x.shape
    _check_state(state, weight.shape, x.dtype, rows, places)
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    out = torch.empty(rows, channels, dtype=x.dtype)
    kernels.convolve(
        CConvolution(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            state=state.data_ptr(),
            places=None if places is None else places.data_ptr(),
            out=out.data_ptr(),
            format=FORMATS[x.dtype],
            silu=int(silu),
            rows=rows,
            channels=channels,
            width=weight.shape[1],
        )
    )
    return out


def convolve_tokens_native(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool, kernels: Native
) -> torch.Tensor:
    """Compute `kernels.recurrent.convolve_tokens_reference`."""
    rows, tokens, channels = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    weight = weight.t().float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    out = torch.empty(rows, tokens, channels, dtype=x.dtype)
    for source, target in zip(x, out, strict=True):
        kernels.convolve_tokens(
            CTokenConvolution(
                x=source.data_ptr(),
                x_stride=source.stride(0),
                weight=weight.data_ptr(),
                bias=None if bias is None else bias.data_ptr(),
                out=target.data_ptr(),
                format=FORMATS[x.dtype],
                silu=int(silu),
                tokens=tokens,
                channels=channels,
                width=len(weight),
            )
        )
    return out
