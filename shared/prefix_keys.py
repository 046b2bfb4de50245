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


def extended_keys(keys: bytes, root: BlockKey, token_bytes: bytes, block_size: int) -> bytes:
    """`keys`, and the keys of the full blocks that follow.

    Args:
        keys: the joined keys of the leading full blocks so far.
        root: the parent of the first block.
        token_bytes: all known tokens, int32.
        block_size: tokens per block.
    """
    width = 4 * block_size
    parent = keys[-KEY_BYTES:] or root
    further = [keys]
    for start in range(len(keys) // KEY_BYTES * width, len(token_bytes) - width + 1, width):
        parent = hashlib.sha256(parent + token_bytes[start : start + width]).digest()
        further.append(parent)
    return b"".join(further)
