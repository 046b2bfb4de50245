"""Captures graphs on all ranks of a group, or on none.

A graph contains the collectives of its step, so all ranks must replay a graph in the same steps.
"""

from collections.abc import Callable

import torch

from worker_svc.device.accelerator import Capture, Graph
from worker_svc.ranks.group import Group


def capture_together(group: Group, capture: Capture) -> Capture:
    """Return a function that captures one graph on every rank, and raises on every rank if one of them cannot."""
    if group.size == 1:
        return capture

    def capture_on_all(compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        found, failure = None, RuntimeError("another rank could not capture the graph")
        try:
            found = capture(compute)
        except Exception as error:  # The other ranks must learn of every failure.
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        if not group.agrees(found is not None) or found is None:
            raise failure
        return found

    return capture_on_all
