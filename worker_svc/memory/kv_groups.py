"""KV groups: which layers share a block table, so that the KV behind a sliding window can be freed.

Without groups, a block holds the KV of its tokens in all layers, and no block can be freed while a layer attends to all
tokens. With groups, a block holds the KV of one group. The first group keeps the KV of all tokens. It has the layers
that attend to all tokens, or some layers if all have a window. The other layers form further groups of at most as many
layers, so that blocks of all groups have equal sizes and one pool serves them. Layer i of each group uses the i-th pair
of tensors.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shared.kv_sizes import MAX_WINDOW_ENTRIES

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
    shapes: Sequence[Hashable],
    windows: Sequence[int | None],
    *,
    max_model_len: int,
    chunk: int,
    num_layer_blocks: int = 0,
) -> KVGroups | str:
    """Divide layers into groups; return the reason if one group suits them better, "" if no layer has a window.

    Other reasons are that the layers' KV differs in size, that no sequence is longer than what a row holds in any case,
    and that too many places of blocks would be unused.

    If all layers have a window, the first group has the first layers, as many as take the least memory for the longest
    sequence. These layers keep the KV of all tokens, but attend to their window only.

    Args:
        shapes: the KV shape of each layer; only compared.
        windows: the sliding window of each layer, tokens; None without one. Empty if the model supports one group only.
        max_model_len: length of the longest sequence, tokens.
        chunk: maximum number of tokens of one row in a step.
        num_layer_blocks: number of blocks that memory holds if a block holds one layer; 0 for no limit.
    """
    if all(window is None for window in windows):
        return ""
    full = [layer for layer, window in enumerate(windows) if window is None or window >= max_model_len]
    windowed = [layer for layer in range(len(windows)) if layer not in full]
    window = max(window for layer in windowed or full if (window := windows[layer]) is not None)
    if window + chunk >= max_model_len:
        return f"no sequence exceeds the window and a chunk ({window:,} + {chunk} tokens)"
    if len(set(shapes)) > 1:
        return "layers store KV of different sizes"
    sizes = [len(full)] if full else range(1, len(windowed))
    reasons = {size: _unsuited(size, len(windows) - size, num_layer_blocks) for size in sizes}
    fitting = [_groups(full, windowed, size, window) for size, reason in reasons.items() if not reason]
    if not fitting:
        return next(reversed(reasons.values()), "the model has one layer")
    return min(fitting, key=lambda groups: groups.num_places * groups.blocks(max_model_len, 1))


def _unsuited(size: int, num_others: int, num_layer_blocks: int) -> str:
    """Return why groups of `size` layers do not suit a model with `num_others` layers after its first group.

    The reason is empty if they suit it.
    """
    num_tables = -(-num_others // size)
    num_unused = num_tables * size - num_others
    if num_tables >= MAX_GROUPS:
        return f"blocks of {size} layers would need more than {MAX_GROUPS} tables per row"
    if num_unused > _MAX_UNUSED * (size + num_others):
        return (
            f"blocks would have room for {num_unused} unused layers, more than {_MAX_UNUSED:.0%} of the model's layers"
        )
    if num_tables * (num_layer_blocks // size) > MAX_WINDOW_ENTRIES:
        return "the memory for KV holds more blocks than the scheduler's table of window blocks"
    return ""


def _groups(full: list[int], windowed: list[int], size: int, window: int) -> KVGroups:
    """Return groups of `size` layers. The first one has the layers without a window, or the first `size` layers."""
    num_layers = len(full) + len(windowed)
    groups, places = [0] * num_layers, [0] * num_layers
    for number, layer in enumerate(full + windowed):
        groups[layer], places[layer] = number // size, number % size
    return KVGroups(tuple(groups), tuple(places), window)
