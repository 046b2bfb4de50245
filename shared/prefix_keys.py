"""Keys of full KV blocks, for sharing equal prompt prefixes.

A full block's key is a hash over its parent's key and its tokens. The parent key of first blocks is a hash over
everything else that affects KV: the model, and the cache scope, which protects tenants from timing attacks on their
prompts. In all processes, equal keys mean equal KV. Front ends compute prompt keys to relieve the scheduler; both use
this module. A sequence's keys are stored joined, `KEY_BYTES` each.
"""

import hashlib

BlockKey = bytes
KEY_BYTES = 32
"""Size of a key."""
SHARED_SCOPE = b"principal\0anonymous"
"""Cache scope of requests without a principal and an explicit scope, shared by all such callers."""


def root_key(fingerprint: str, scope: bytes) -> BlockKey:
    """Return the parent key of all first blocks with one model and scope."""
    return hashlib.sha256(b"quire\0" + fingerprint.encode() + b"\0" + scope).digest()


def following_keys(parent: BlockKey, token_bytes: bytes, block_size: int) -> bytes:
    """Return the joined keys of the full blocks that follow `parent`.

    Args:
        parent: key of the previous block, or the root key.
        token_bytes: tokens of the following blocks, int32.
        block_size: tokens per block.
    """
    width = 4 * block_size
    keys = []
    for start in range(0, len(token_bytes) - width + 1, width):
        parent = hashlib.sha256(parent + token_bytes[start : start + width]).digest()
        keys.append(parent)
    return b"".join(keys)
