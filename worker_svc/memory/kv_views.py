"""Views of KV blocks for attention, where the layers with a window differ in size from the others.

Kernels expect one layer's keys or values as a contiguous tensor, whose blocks have block IDs. `kv_groups` describes how
layers share places, or how a layer is divided among groups. Then a place's tensor is viewed with another shape of
blocks, and block tables and slots are changed accordingly, once per step:

* If r layers share a place, a block of it is viewed as r blocks. The layer with part o uses block ``r * block + o``.
* If a layer is divided among r groups, its blocks hold the r-th part of the tokens. Block i of its table is block
  ``i // r`` in the table of group ``i % r``.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.kv_quantised import cached_size
from worker_svc.interface.arrays import IntArray
from worker_svc.memory.kv_groups import KVGroups
from worker_svc.model.base import KVCache, KVShape


def layer_caches(places: Sequence[KVCache], shapes: Sequence[KVShape], groups: KVGroups) -> list[KVCache]:
    """Return the keys and values of each layer as views of the places.

    Args:
        places: the keys and values of each place, each `[num_blocks, num_kv_heads, block_size, width]`.
        shapes: the KV shape of each layer.
        groups: the groups of the layers.
    """

    def view(tensor: torch.Tensor, shape: KVShape, width: int, layer: int) -> torch.Tensor:
        size = tensor.shape[2] // (groups.groups_per_layer if groups.groups[layer] else 1)
        return tensor.view(-1, shape.num_kv_heads, size, cached_size(width, tensor.dtype))

    return [
        (view(keys, shape, shape.widths[0], layer), view(values, shape, shape.widths[1], layer))
        for layer, shape in enumerate(shapes)
        for keys, values in (places[groups.places[layer]],)
    ]


def window_slots(groups: KVGroups, blocks: IntArray, offsets: IntArray, block_size: int) -> IntArray:
    """Return the slots of tokens in each block table for windows, `[tables, n]`, contiguous.

    Args:
        groups: the groups of the layers.
        blocks: block of each token in each group after the first, `[groups - 1, n]`.
        offsets: offset of each token in its block, `[n]`.
        block_size: tokens per block.
    """
    per_layer, per_place = groups.groups_per_layer, groups.layers_per_place
    if per_layer > 1:
        block_size //= per_layer
        number, offsets = np.divmod(offsets, block_size)
        by_layer = blocks.reshape(-1, per_layer, len(offsets))
        blocks = by_layer[:, number, np.arange(len(offsets))]
    elif per_place > 1:
        blocks = (blocks[:, None] * per_place + np.arange(per_place)[:, None]).reshape(-1, len(offsets))
    slots: IntArray = np.ascontiguousarray(blocks * block_size + offsets)
    return slots


def window_tables(groups: KVGroups, tables: torch.Tensor) -> torch.Tensor:
    """Return the block tables for windows, `[tables, R, positions] int32`, contiguous.

    Args:
        groups: the groups of the layers.
        tables: the block tables of the groups after the first, `[groups - 1, R, positions] int32`.
    """
    per_layer, per_place = groups.groups_per_layer, groups.layers_per_place
    if per_layer > 1:
        by_layer = tables.view(-1, per_layer, *tables.shape[1:])
        return by_layer.movedim(1, 3).flatten(2)
    if per_place > 1:
        parts = torch.arange(per_place, dtype=tables.dtype, device=tables.device)
        return (tables[:, None] * per_place + parts[:, None, None]).flatten(0, 1)
    return tables
