"""KV groups: which layers share a block table, so that the KV behind a sliding window can be freed.

Without groups, a block holds the KV of its tokens in all layers, and no block can be freed while a layer attends to all
tokens. With groups, a block holds the KV of one group. The first group has the layers that attend to all tokens. The
layers with a window form further groups of at most as many layers, so that blocks of all groups have equal sizes and
one pool serves them. Layer i of each group uses the i-th pair of tensors.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

WINDOW_CHUNK = 384
"""Maximum number of tokens of one row in a step. A row holds the KV of so many tokens in addition to its window."""
_MAX_UNUSED = 0.15
"""Maximum share of unused layers, by which the last group may be smaller than a block."""
MAX_GROUPS = 64


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of a model's layers."""

    groups: tuple[int, ...]
    """Group of each layer."""
    places: tuple[int, ...]
    """Place of each layer in its group."""
    window: int
    """Maximum number of tokens that a token attends to in the groups after the first, including itself."""

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return 1 + max(self.groups)

    @property
    def num_places(self) -> int:
        """Number of layers whose KV a block holds."""
        return 1 + max(self.places)

    def blocks(self, num_positions: int, block_size: int) -> int:
        """Return the number of blocks that a sequence holds: of all tokens in the first group, of the newest in others.

        Args:
            num_positions: number of blocks of its tokens.
            block_size: tokens per block.
        """
        period = -(-(self.window + WINDOW_CHUNK - 2) // block_size) + 1
        return num_positions + (self.num_groups - 1) * min(num_positions, period)


def divide(
    shapes: Sequence[Hashable], windows: Sequence[int | None], *, max_model_len: int, chunk: int
) -> KVGroups | None:
    """Divide layers into groups; return None if one group suits them better.

    That is the case if all layers have the same kind, if their KV differs in size, if no sequence is longer than what a
    row holds in any case, or if too many places of blocks would be unused.

    Args:
        shapes: the KV shape of each layer; only compared.
        windows: the sliding window of each layer, tokens; None without one. Empty if the model supports one group only.
        max_model_len: length of the longest sequence, tokens.
        chunk: maximum number of tokens of one row in a step.
    """
    full = [layer for layer, window in enumerate(windows) if window is None or window >= max_model_len]
    windowed = [layer for layer in range(len(windows)) if layer not in full]
    if not full or not windowed or len(set(shapes)) > 1:
        return None
    window = max(window for layer in windowed if (window := windows[layer]) is not None)
    num_tables = -(-len(windowed) // len(full))
    unused = num_tables * len(full) - len(windowed)
    if unused > _MAX_UNUSED * len(windows) or num_tables >= MAX_GROUPS or window + chunk >= max_model_len:
        return None
    groups, places = [0] * len(windows), [0] * len(windows)
    for place, layer in enumerate(full):
        places[layer] = place
    for number, layer in enumerate(windowed):
        groups[layer], places[layer] = 1 + number // len(full), number % len(full)
    return KVGroups(tuple(groups), tuple(places), window)
