"""Muon: momentum with orthogonalised updates, for the weight matrices of a small transformer.

A few Newton-Schulz steps replace each matrix's momentum by approximately the nearest matrix with equal singular values.
On this small model and a slow CPU, this reaches the same accuracy in clearly fewer tokens than AdamW. Embeddings and
norms stay with AdamW.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; the step is scaled so that `lr` fits matrices of any shape."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.05,
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for (rows, columns), parameters in by_shape.items():
                momenta = torch.stack([self._momentum(parameter, group["momentum"]) for parameter in parameters])
                updates = orthogonalised(momenta) * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"])

    def _momentum(self, parameter: torch.nn.Parameter, decay: float) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None, "every matrix takes part in every step"
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["momentum"]
        momentum.lerp_(gradient, 1.0 - decay)
        return gradient.lerp(momentum, decay)


def orthogonalised(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return `matrices` [batch, rows, columns] with their singular values moved close to 1."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: torch.Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
