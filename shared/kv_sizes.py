"""KV cache sizes: bytes per token, and the number of blocks that fit.

A token stores a key and a value in every layer:

    bytes of a key or value = elements x bits per element / 8 + bytes of its scales
    bytes per token = sum over layers of KV heads x (bytes of a key + bytes of a value)

With grouped-query attention, a model has fewer KV heads than query heads. The number of query heads has no effect.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.config import ConfigError

DISK_HEADER_BYTES = 128
"""Bytes before the content of a block's file on disk."""
MAX_DISK_BLOCKS = 1 << 20
"""Maximum number of blocks on a worker's disk. It bounds the memory of the tables."""
MAX_WINDOW_ENTRIES = 1 << 25
"""Maximum number of entries in the scheduler's table of window blocks: one per block and KV group, 8 bytes each."""
_PAGE_BYTES = 4096
"""Files on a usual file system have a multiple of this size."""


@dataclass(frozen=True, slots=True)
class KVType:
    """Layout of a token's keys and values, by cache type."""

    bits: int
    """Bits of an element."""
    scale_bytes: int = 0
    """Bytes per scale; in int4, per scale and zero."""
    group: int = 0
    """Number of vector elements that share a scale; 0 for all elements of a vector."""

    @property
    def multiple(self) -> int:
        """The number of elements of a key or value must be a multiple of this."""
        return self.group or (4 if self.scale_bytes else 1)

    def vector_bytes(self, size: int) -> int:
        """Return the bytes of a key or value with `size` elements."""
        return size * self.bits // 8 + self.scale_bytes * (size // self.group if self.group else 1)


KV_TYPES = {
    "float32": KVType(32),
    "bfloat16": KVType(16),
    "float16": KVType(16),
    "fp8": KVType(8, 4),
    "int8": KVType(8, 4),
    "int4": KVType(4, 4, 32),
}


def unsuitable_heads(kv_type: str, widths: Iterable[int]) -> str:
    """Return why a cache type cannot store keys and values with these numbers of elements; "" if it can."""
    multiple = KV_TYPES[kv_type].multiple
    odd = next((width for width in widths if width % multiple), None)
    if odd is None:
        return ""
    others = "auto" if odd % KV_TYPES["int8"].multiple else "int8 or auto"
    return f"{kv_type} needs heads whose size is a multiple of {multiple}, not {odd}; use {others}"


def kv_bytes_per_token(layers: Iterable[tuple[int, tuple[int, int]]], kv_type: str) -> int:
    """Return the size in bytes of a token's keys and values in all layers.

    Args:
        layers: for each layer, the number of KV heads, and the numbers of elements per key and per value.
        kv_type: one of `KV_TYPES`.
    """
    return sum(sum(kv_bytes_of_layer(*layer, kv_type)) for layer in layers)


def kv_bytes_of_layer(num_kv_heads: int, widths: tuple[int, int], kv_type: str) -> tuple[int, int]:
    """Return the sizes in bytes of a token's keys and of its values in one layer; see `kv_bytes_per_token`."""
    keys, values = map(KV_TYPES[kv_type].vector_bytes, widths)
    return num_kv_heads * keys, num_kv_heads * values


def default_checkpoints(rows: int, state_bytes: int, memory: int, *, has_kv: bool) -> int:
    """Return the default number of checkpoints of recurrent states: two per row, if memory suffices.

    They take at most a quarter of the memory, and at most half of what the states of the rows leave.

    Args:
        rows: number of rows.
        state_bytes: bytes of a row's state.
        memory: bytes for states and KV.
        has_kv: whether the model also has keys and values.
    """
    left = memory - rows * state_bytes
    share = min(memory // 4, left // 2) if has_kv else left
    return max(0, min(2 * rows, share // state_bytes))


def default_host_states(
    rows: int, checkpoints: int, state_bytes: int, *, memory: int, host_memory: int, has_kv: bool
) -> int:
    """Return the number of recurrent states in host memory.

    There is one per row, for preempted requests. For cached prefixes, there are as many per byte of host memory as
    there are checkpoints per byte of the device's memory. All take at most a quarter of the host memory.

    Args:
        rows: number of rows.
        checkpoints: number of checkpoints on the device.
        state_bytes: bytes of a row's state.
        memory: bytes that the device uses for states and KV.
        host_memory: bytes of host memory for states and KV.
        has_kv: whether the model also has keys and values. Otherwise states may take all of the host memory.
    """
    share = host_memory // 4 if has_kv else host_memory
    return min(rows + -(-checkpoints * host_memory // max(1, memory)), share // state_bytes)


def count_host_blocks(host_memory: int, num_state_bytes: int, bytes_per_block: int, num_kv_groups: int = 1) -> int:
    """Return the number of KV blocks that fit into host memory.

    Args:
        host_memory: bytes of host memory for states and KV.
        num_state_bytes: bytes of the recurrent states there, at most a quarter of it.
        bytes_per_block: bytes of a block.
        num_kv_groups: number of blocks for the same tokens.

    Raises:
        ConfigError: there is host memory, but too little for the shortest prefix.
    """
    number, least = (host_memory - num_state_bytes) // bytes_per_block, num_kv_groups * bytes_per_block
    if host_memory and number < num_kv_groups:
        least = -(-4 * least // 3) if num_state_bytes else least
        raise ConfigError(
            f"host_cache: {host_memory:,} bytes are too little for the KV of one block; use at least {least:,},"
            " or 0 for no host memory"
        )
    return number


def count_disk_blocks(disk_bytes: int, bytes_per_block: int) -> int:
    """Return the number of blocks that fit on a disk, each in a file of its own."""
    file_bytes = -(-(DISK_HEADER_BYTES + bytes_per_block) // _PAGE_BYTES) * _PAGE_BYTES
    return min(disk_bytes // file_bytes, MAX_DISK_BLOCKS)


def count_blocks(memory: int, bytes_per_block: int, most_usable: int, setting: str) -> int:
    """Return the number of blocks to allocate: as many as fit into `memory` bytes, at most `most_usable`.

    Blocks of a model without keys and values have 0 bytes.

    Raises:
        ConfigError: no block fits; the message names `setting`.
    """
    fitting = memory // bytes_per_block if bytes_per_block else most_usable
    if fitting < 1:
        raise ConfigError(
            f"{setting}: {max(memory, 0):,} bytes remain for the KV cache, but one block needs {bytes_per_block:,};"
            " raise it"
        )
    return min(fitting, most_usable)
