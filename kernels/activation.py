"""The gate of a SwiGLU MLP (Shazeer, 2020): ``silu(gate) · up``.

The gate and up projections are one GEMM, so their outputs arrive side by side: ``gate_up`` is
``[num_tokens, 2 * intermediate]``, the gate in the first half; the result is ``[num_tokens, intermediate]``.

Rounding is that of `transformers`: silu in float32, rounded to the dtype, then the product rounded again.
"""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate_up[:, :I]) * gate_up[:, I:]`` for ``gate_up`` ``[num_tokens, 2 * I]``, in its dtype."""
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch form of `silu_mul`; also the CPU path."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
