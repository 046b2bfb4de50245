"""KV groups: which layers share a block table, so that the KV behind a sliding window can be freed.

Without groups, a block holds the KV of its tokens in all layers, and no block can be freed while a layer attends to all
tokens. With groups, a block holds the KV of one group. The first group keeps the KV of all tokens. It has the layers
that attend to all tokens, or some layers if all have a window. The other layers form further groups of at most as many
layers, so that blocks of all groups have equal sizes and one pool serves them. Layer i of each group uses the i-th
*place* of its blocks, a pair of tensors.

A place has the size of a layer in the first group. The layers with a window may have another size, as in Gemma 4:

* If they are r times smaller, r of them share a place. Each has one of its r equal *parts*.
* If they are r times larger, their KV is divided among r groups by tokens. A block of such a group holds a block's r-th
  part of the tokens: those of block p in the sequence are in the p-th blocks of r tables.

So all groups have tables with as many positions, and the scheduler does not know about sizes. `kv_views` has the
tensors and tables that attention uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.kv_sizes import MAX_WINDOW_ENTRIES

WINDOW_CHUNK = 384
"""Maximum number of tokens of one row in a step. A row holds the KV of so many tokens in addition to its window."""
_MAX_UNUSED = 0.15
"""Maximum share of unused bytes, by which the last group may be smaller than a block."""
MAX_GROUPS = 64

KVBytes = tuple[int, int]
"""Bytes of a token's keys and of its values in one layer."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of a model's layers."""

    groups: tuple[int, ...]
    """Group of each layer, or its first group."""
    places: tuple[int, ...]
    """Place of each layer in its group."""
    window: int
    """Maximum number of tokens that a token attends to in the groups after the first, including itself."""
    parts: tuple[int, ...] = ()
    """Part of its place that each layer has; empty if all layers have whole places."""
    layers_per_place: int = 1
    """Number of layers that share a place in the groups after the first."""
    groups_per_layer: int = 1
    """Number of groups among which the KV of a layer with a window is divided."""

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return max(self.groups) + self.groups_per_layer

    @property
    def table_numbers(self) -> tuple[int, ...]:
        """Block table of each layer, as attention sees it: 0 is that of the first group (`kv_views`)."""
        parts = self.parts or (0,) * len(self.groups)
        return tuple(
            1 + (group - 1) // self.groups_per_layer * self.layers_per_place + part if group else 0
            for group, part in zip(self.groups, parts, strict=True)
        )

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
    sizes: Sequence[KVBytes],
    windows: Sequence[int | None],
    *,
    max_model_len: int,
    chunk: int,
    block_size: int,
    memory: int = 0,
) -> KVGroups | str:
    """Divide layers into groups; return the reason if one group suits them better, "" if no layer has a window.

    Other reasons are that no sequence is longer than what a row holds in any case, and that too many bytes of blocks
    would be unused. Another one is that layers with or without a window differ among each other in size, or that
    neither of both sizes is a multiple of the other.

    If all layers have a window, the first group has the first layers, as many as take the least memory for the longest
    sequence. These layers keep the KV of all tokens, but attend to their window only.

    Args:
        sizes: the KV size of each layer.
        windows: the sliding window of each layer, tokens; None without one. Empty if the model supports one group only.
        max_model_len: length of the longest sequence, tokens.
        chunk: maximum number of tokens of one row in a step.
        block_size: tokens per block.
        memory: bytes for KV; 0 for no limit.
    """
    if all(window is None for window in windows):
        return ""
    full = [layer for layer, window in enumerate(windows) if window is None or window >= max_model_len]
    windowed = [layer for layer in range(len(windows)) if layer not in full]
    window = max(window for layer in windowed or full if (window := windows[layer]) is not None)
    if window + chunk >= max_model_len:
        return f"no sequence exceeds the window and a chunk ({window:,} + {chunk} tokens)"
    of_full, of_windowed = {sizes[layer] for layer in full or windowed}, {sizes[layer] for layer in windowed}
    if len(of_full) > 1 or len(of_windowed) > 1:
        return "layers with a window, or those without, store KV of different sizes"
    (place,), (layer_size,) = of_full, of_windowed
    layers_per_place, groups_per_layer = _ratio(place, layer_size), _ratio(layer_size, place)
    if not (layers_per_place or groups_per_layer):
        return "layers store KV of two sizes, of which neither is a multiple of the other"
    if block_size % (groups_per_layer or 1):
        return f"a block of {block_size} tokens cannot be divided by {groups_per_layer}, the ratio of the layers' sizes"
    layout = _Layout(full, windowed, window, layers_per_place or 1, groups_per_layer or 1)
    num_place_blocks = memory // (block_size * sum(place))
    reasons = {
        size: layout.unsuited(size, num_place_blocks) for size in ([len(full)] if full else range(1, len(windowed)))
    }
    fitting = [layout.groups(size) for size, reason in reasons.items() if not reason]
    if not fitting:
        return next(reversed(reasons.values()), "the model has one layer")
    return min(fitting, key=lambda groups: groups.num_places * groups.blocks(max_model_len, 1))


def _ratio(larger: KVBytes, smaller: KVBytes) -> int:
    """Return how many times larger one size is, in keys and in values; 0 if it is not a multiple of the other."""
    ratio = larger[0] // smaller[0]
    return ratio if larger == (ratio * smaller[0], ratio * smaller[1]) else 0


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layers to divide, and how those with a window fit into places."""

    full: list[int]
    windowed: list[int]
    window: int
    layers_per_place: int
    groups_per_layer: int

    def _num_groups(self, size: int) -> int:
        """Return the number of groups after the first if a block has `size` places."""
        num_windowed = len(self.windowed) if self.full else len(self.windowed) - size
        return -(-num_windowed // (size * self.layers_per_place)) * self.groups_per_layer

    def unsuited(self, size: int, num_place_blocks: int) -> str:
        """Return why blocks with `size` places do not suit the model; empty if they suit it.

        Args:
            size: number of places.
            num_place_blocks: number of blocks with one place that memory holds.
        """
        num_groups, num_first = self._num_groups(size), len(self.full) or size
        num_others = len(self.full) + len(self.windowed) - num_first
        # In units of the smaller size. Blocks of the first group are full.
        needed = num_first * self.layers_per_place + num_others * self.groups_per_layer
        unused = (1 + num_groups) * size * self.layers_per_place - needed
        if num_groups >= MAX_GROUPS:
            return f"blocks of {size} layers would need more than {MAX_GROUPS} tables per row"
        if unused > _MAX_UNUSED * needed:
            return (
                f"blocks would have room for {unused // self.groups_per_layer} unused layers, more than"
                f" {_MAX_UNUSED:.0%} of the model's KV"
            )
        if num_groups * (num_place_blocks // size) > MAX_WINDOW_ENTRIES:
            return "the memory for KV holds more blocks than the scheduler's table of window blocks"
        return ""

    def groups(self, size: int) -> KVGroups:
        """Return groups with `size` places. The first has the layers without a window, or the first `size` layers."""
        layers = self.full + self.windowed
        groups, places, parts = [0] * len(layers), [0] * len(layers), [0] * len(layers)
        for place, layer in enumerate(layers[:size]):
            places[layer] = place
        for number, layer in enumerate(layers[size:]):
            of_part, parts[layer] = divmod(number, self.layers_per_place)
            group, places[layer] = divmod(of_part, size)
            groups[layer] = 1 + group * self.groups_per_layer
        return KVGroups(
            tuple(groups),
            tuple(places),
            self.window,
            tuple(parts) if self.layers_per_place > 1 else (),
            self.layers_per_place,
            self.groups_per_layer,
        )
