"""Keys of full KV blocks: which prompts share their beginning.

The key of a full block is a hash over its parent's key and its tokens; the first parent is a hash over everything else
that makes KV differ: the model and the scope that separates those who must not probe each other's prompts. Equal keys
mean equal KV, whoever computed it. Front ends compute the keys of prompts, so that the scheduler does not have to; both
use this module. The keys of a sequence are kept joined, `KEY_BYTES` each.
"""

import hashlib

BlockKey = bytes
KEY_BYTES = 32


def root_key(fingerprint: str, scope: bytes) -> BlockKey:
    """The parent of all first blocks of one model and scope."""
    return hashlib.sha256(b"quire\0" + fingerprint.encode() + b"\0" + scope).digest()


def following_keys(parent: BlockKey, token_bytes: bytes, block_size: int) -> bytes:
    """The joined keys of the full blocks that follow `parent`.

    Args:
        parent: the key of the block before, or the root.
        token_bytes: the tokens from there on, int32.
        block_size: tokens per block.
    """
    width = 4 * block_size
    keys = []
    for start in range(0, len(token_bytes) - width + 1, width):
        parent = hashlib.sha256(parent + token_bytes[start : start + width]).digest()
        keys.append(parent)
    return b"".join(keys)
