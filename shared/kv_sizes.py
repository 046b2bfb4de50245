"""Sizes of the KV cache: bytes of a token, and the number of blocks that fit.

A token stores a key and a value in every layer:

    bytes of a key or value = elements x bytes per element + bytes of a scale
    bytes per token = sum over layers of KV heads x (bytes of a key + bytes of a value)

With grouped-query attention, a model has fewer KV heads than query heads. The number of query heads has no effect.
"""

from collections.abc import Iterable

from shared.config import ConfigError

KV_ELEMENTS = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "fp8": (1, 4), "int8": (1, 4)}
"""Bytes per element, and bytes of the scale per token and head, for each cache type."""


def kv_bytes_per_token(layers: Iterable[tuple[int, int]], kv_type: str) -> int:
    """Return the size in bytes of a token's keys and values in all layers.

    Args:
        layers: for each layer, the number of KV heads, and the size of a key plus that of a value, in elements.
        kv_type: one of `KV_ELEMENTS`.
    """
    element_bytes, scale_bytes = KV_ELEMENTS[kv_type]
    return sum(num_kv_heads * (size * element_bytes + 2 * scale_bytes) for num_kv_heads, size in layers)


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
