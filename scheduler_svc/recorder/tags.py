"""Tags: keyed hashes that stand in a record for block keys, identities, cache scopes and grammars.

Equal values have equal tags. Without the key, a tag reveals nothing else. The key is generated when the scheduler
starts and is never written. A replay uses the tags instead of the values.

Where the size of a value matters, as for a block key or a grammar, the tag is zero-padded or truncated to that size.
Two three-byte grammars, the shortest that can differ, have equal tags in one of 16 million pairs.
"""

import hashlib
import os
from collections import OrderedDict

from shared.prefix_keys import KEY_BYTES

TAG_BYTES = 6
"""Size of a tag. Only tags of blocks after a common prefix are compared, so a collision is very unlikely."""
_MAX_GRAMMARS = 1 << 14


class Tagger:
    """Makes the tags of one scheduler process."""

    def __init__(self, key: bytes | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=TAG_BYTES, key=key if key is not None else os.urandom(32))
        self._grammar_sizes: OrderedDict[bytes, int] = OrderedDict()
        """Grammar sizes by SHA-256, which is the grammar's key in the core. Only recent ones are kept."""

    def tag(self, value: bytes) -> bytes:
        """Return the tag of a value; empty for an empty value."""
        if not value:
            return b""
        hasher = self._hash.copy()
        hasher.update(value)
        return hasher.digest()

    def tag_keys(self, keys: bytes) -> bytes:
        """Return the joined tags of joined block keys."""
        # Same as `tag` without a call per key, because a request has dozens of keys.
        new, tags = self._hash.copy, []
        for start in range(0, len(keys), KEY_BYTES):
            hasher = new()
            hasher.update(keys[start : start + KEY_BYTES])
            tags.append(hasher.digest())
        return b"".join(tags)

    def grammar_tag(self, grammar: bytes) -> bytes:
        """Return a grammar's tag, which is its key's tag; empty for none."""
        if not grammar:
            return b""
        key = hashlib.sha256(grammar).digest()
        self._grammar_sizes[key] = len(grammar)
        self._grammar_sizes.move_to_end(key)
        if len(self._grammar_sizes) > _MAX_GRAMMARS:
            self._grammar_sizes.popitem(last=False)
        return self.tag(key)

    def grammar_key(self, key: bytes) -> bytes:
        """Return the key that a replaying core computes for the grammar with this key."""
        size = self._grammar_sizes.get(key)
        return b"" if not key else fit(self.tag(key), KEY_BYTES) if size is None else replay_key(self.tag(key), size)


def replay_key(tag: bytes, size: int) -> bytes:
    """Return the key that a replaying core computes for a grammar of `size` bytes."""
    return hashlib.sha256(fit(tag, size)).digest()


def fit(tag: bytes, size: int) -> bytes:
    """Return a tag, zero-padded or truncated to `size` bytes."""
    return tag[:size].ljust(size, b"\0")


def to_keys(tags: bytes) -> bytes:
    """Return joined tags as joined block keys."""
    return b"".join([fit(tags[start : start + TAG_BYTES], KEY_BYTES) for start in range(0, len(tags), TAG_BYTES)])
