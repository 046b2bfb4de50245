"""Graphs of several ranks: all ranks have a graph, or none has."""

from collections.abc import Callable

import pytest
import torch

from tests.worker_svc.fake_accelerator import FakeAccelerator
from worker_svc.device.accelerator import Graph
from worker_svc.ranks.capture import capture_together
from worker_svc.ranks.group import Group
from worker_svc.ranks.shard import Shard


class Voting(Group):
    """One of two ranks, whose other rank votes as given."""

    def __init__(self, other: int) -> None:
        super().__init__(Shard(0, 2))
        self.votes: list[int] = []
        self._other = other

    def least(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """See `Group.least`."""
        self.votes += numbers
        return (min(*numbers, self._other),)


def refuse(_: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
    """Refuse the capture."""
    raise RuntimeError("operation not permitted")


def test_a_graph_that_all_ranks_have_is_used() -> None:
    """The result is that of the capture."""
    group = Voting(other=1)

    _, result = capture_together(group, FakeAccelerator().capture)(lambda: torch.ones(3))

    assert result.tolist() == [1, 1, 1]
    assert group.votes == [1]


def test_a_graph_that_another_rank_lacks_is_not_used() -> None:
    """The capture of this rank succeeds, and fails nevertheless."""
    with pytest.raises(RuntimeError, match="another rank could not capture"):
        capture_together(Voting(other=0), FakeAccelerator().capture)(lambda: torch.ones(3))


def test_the_other_ranks_learn_of_a_refusal() -> None:
    """A rank that cannot capture votes before it fails, with its own reason."""
    group = Voting(other=1)

    with pytest.raises(RuntimeError, match="operation not permitted"):
        capture_together(group, refuse)(lambda: torch.ones(3))
    assert group.votes == [0]
