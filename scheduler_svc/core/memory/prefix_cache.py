"""Prefix cache: shares full blocks with hash-chained keys (as in vLLM), stored as a radix tree (as in SGLang).

A block's key identifies all tokens up to its end, so the cached keys form a tree. A node is a run of keys without a
branch, with the blocks that hold their KV. Prompts have hundreds of blocks. A run needs one lookup and one `memcmp`,
and blocks have no Python objects.

A block is shareable as soon as the step that writes it has been sent. Plans are executed in order, and within a step
every layer writes the whole batch's KV before it attends. A block without holders stays in the cache until its memory
is needed. The least recently used block is evicted first, and a chain's end before its start (see `BlockPool`). Blocks
after an evicted block can no longer be found, so they are evicted too.

While a prompt is being computed, the key of the block that its row computes next is *pending*. A request with the same
prefix finds all earlier blocks in the cache. It waits for the block with the pending key instead of computing that
block again.
"""

from collections import Counter

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray, any_of
from scheduler_svc.core.memory.host_keys import BlockEntry, CachedBlock, ChainPlace
from scheduler_svc.core.memory.partial_blocks import PartialBlocks, PartialMatch, num_common
from scheduler_svc.core.memory.prefix_directory import PrefixDirectory
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.memory.window_blocks import WindowBlocks, window_key
from shared.frames import TOKEN_BYTES
from shared.prefix_keys import KEY_BYTES, BlockKey

_RUN = 1 << 32
"""Upper bound on the number of blocks in a run."""
_ROOT = 0
"""Number of the root node, which is its own parent."""
_NO_TABLE = -1
"""In place of a window block's table: a full block."""


class _Node:
    """A run of joined keys and their blocks, with their tokens if parts of blocks are shared."""

    __slots__ = ("blocks", "children", "keys", "number", "parent", "root", "tokens")

    def __init__(
        self, number: int, parent: int, keys: bytes, blocks: IndexArray, tokens: bytes, root: BlockKey
    ) -> None:
        self.number = number
        self.parent = parent
        """Number of the parent. A reference would create a cycle that keeps a lost worker's tree alive until the next
        GC.
        """
        self.keys = keys
        self.blocks = blocks
        self.tokens = tokens
        self.root = root
        """Key before the first block of the sequence."""
        self.children: dict[BlockKey, _Node] = {}
        """By the first key of each child."""


_Place = tuple[_Node, int, int, list[IndexArray]]
"""Position of a chain of keys in the tree.

The node of the last found block, the number of its found blocks, the number of all found blocks, and these blocks.
"""


class PrefixCache:
    """Map from keys to the blocks with their KV, for one worker in one epoch."""

    def __init__(
        self,
        num_blocks: int,
        partial: PartialBlocks | None = None,
        directory: PrefixDirectory | None = None,
        epoch: int = 0,
        facts: TokenFacts | None = None,
        checkpoints: StateCheckpoints | None = None,
        windows: WindowBlocks | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            num_blocks: blocks of the worker.
            partial: index of partial blocks; None if only full blocks are shared.
            directory: gets the keys of first blocks, under `epoch`.
            epoch: the worker's epoch.
            facts: gets every partial match.
            checkpoints: states after blocks, which are dropped with their blocks; None if the model has no state.
            windows: window blocks attached to cached blocks, which are dropped with them; None without windows.
        """
        self._windows = windows
        self._checkpoints = checkpoints
        self._facts = facts if facts is not None else TokenFacts()
        self._directory = directory
        self._epoch = epoch
        self.partial = partial
        self._width = 0 if partial is None else TOKEN_BYTES * partial.block_size
        """Bytes of tokens stored per block."""
        self._root = _Node(_ROOT, _ROOT, b"", NO_INDICES, b"", b"")
        self._nodes: list[_Node | None] = [self._root]
        self._unused: list[int] = []
        """Node numbers that are not in use."""
        self._places = np.zeros(num_blocks, np.int64)
        """For blocks in this cache: their node's number times `_RUN`, plus their index in the node."""
        self._next_keys: dict[int, BlockKey] = {}
        """For each row in prefill, the key of the block that it computes next."""
        self._pending: dict[BlockKey, int] = {}
        """For each key, the number of rows in prefill that compute this block next."""
        self.holds = np.zeros(num_blocks, np.bool_)
        """Whether a block is shareable, is a tail to copy from, or is an attached window block; read-only."""
        self.doubted = np.zeros(num_blocks, np.bool_)
        """Shareable blocks that a failed request has shared (`row_failures`); read-only."""

    def leave_directory(self) -> None:
        """Remove this cache's keys from the directory, because its worker is lost."""
        if self._directory is not None:
            for key in self._root.children:
                self._directory.remove(key, self._epoch)
            self._directory = None

    def match(self, keys: bytes) -> IndexArray:
        """Return the blocks of the longest cached prefix of the joined `keys`."""
        if keys[:KEY_BYTES] not in self._root.children:
            return NO_INDICES  # Most prompts begin with a new block.
        _, _, _, found = self._walk(keys)
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else NO_INDICES

    def count(self, keys: bytes) -> int:
        """Return the number of blocks in the longest cached prefix of the joined `keys`."""
        return self._walk(keys)[2] if keys[:KEY_BYTES] in self._root.children else 0

    def entries(self, blocks: IndexArray) -> list[CachedBlock]:
        """Return the blocks that can move to another tier, with their entries.

        Tails of partial blocks and doubted blocks cannot. Of the window blocks, only those of a run's last tails can.
        """
        found = []
        first_needed: dict[int, int] = {}
        num_before: dict[int, int] = {}
        for block in blocks.tolist():
            if not self.holds.item(block):
                continue
            full, table = (block, _NO_TABLE) if self._windows is None else self._windows.owner(block)
            if full < 0:
                full, table = block, _NO_TABLE
            if self.doubted.item(full) or (self.partial is not None and self.partial.tails.item(full)):
                continue
            number, offset = divmod(self._places.item(full), _RUN)
            node = self._nodes[number]
            assert node is not None
            key = node.keys[KEY_BYTES * offset : KEY_BYTES * (offset + 1)]
            if table == _NO_TABLE:
                entry = BlockEntry(key, node.root, not offset and node.parent == _ROOT)
                chain = None
                if self._checkpoints is not None:
                    if number not in num_before:
                        num_before[number] = self._count_before(node)
                    chain = self._chain_place(self._checkpoints, node, offset, num_before[number])
                found.append(CachedBlock(block, entry, chain))
                continue
            assert self._windows is not None
            if number not in first_needed:
                first_needed[number] = self._windows.first_needed(node.blocks)
            if offset >= first_needed[number]:
                found.append(CachedBlock(block, BlockEntry(window_key(key, table), node.root, False), None))
        return found

    def _count_before(self, node: _Node) -> int:
        """Return the number of blocks before a node in its sequence."""
        number, num_blocks = node.parent, 0
        while number != _ROOT:
            parent = self._nodes[number]
            assert parent is not None
            num_blocks += len(parent.blocks)
            number = parent.parent
        return num_blocks

    def _chain_place(self, checkpoints: StateCheckpoints, node: _Node, offset: int, num_before: int) -> ChainPlace:
        """Return the place of a block with index `offset` in `node`; `num_before` blocks are before the node."""
        if offset:
            previous = node.keys[KEY_BYTES * (offset - 1) : KEY_BYTES * offset]
        else:
            parent = self._nodes[node.parent]
            assert parent is not None
            previous = parent.keys[-KEY_BYTES:]
        is_superseded = checkpoints.reach(node.blocks[offset + 1 :]) > 0
        slot = checkpoints.present_slot(node.blocks.item(offset))
        return ChainPlace(previous, num_before + offset + 1, slot, is_superseded)

    def restore_windows(self, full: IndexArray, tables: IndexArray, blocks: IndexArray) -> None:
        """Attach window blocks that are copied from host memory; see `WindowBlocks.restore`."""
        assert self._windows is not None
        self.holds[self._windows.restore(full, tables, blocks)] = True

    def publish(self, keys: bytes, blocks: IndexArray, tokens: bytes = b"", root: BlockKey = b"") -> None:
        """Make a chain of blocks shareable, except where other blocks already have the keys.

        Args:
            keys: the joined keys of the chain, from the first block of the sequence on.
            blocks: the blocks, one per key.
            tokens: their tokens, int32, if parts of blocks are shared.
            root: the key before the first block, which a tier on disk stores; empty if there is none.
        """
        node, offset, depth, _ = self._walk(keys)
        if depth == len(blocks):
            return
        keys, blocks, tokens = keys[KEY_BYTES * depth :], blocks[depth:].copy(), tokens[self._width * depth :]
        if offset < len(node.blocks):
            self._split(node, offset)
        if node is not self._root and not node.children:
            first = len(node.blocks)
            node.keys += keys
            node.blocks = np.concatenate((node.blocks, blocks))
            node.tokens += tokens
        else:
            first = 0
            node = self._add(node, keys, blocks, tokens, root)
        self._number(node, blocks, first)
        self.holds[blocks] = True

    def forget(self, blocks: IndexArray) -> IndexArray:
        """Evict blocks because their memory is needed or their content is wrong.

        Args:
            blocks: in any order; preferably each chain from its start.

        Returns:
            all blocks that left the cache: the given blocks that were in it, and the blocks after them.
        """
        gone: list[IndexArray] = []
        if self.partial is not None and any_of(tails := self.partial.tails[blocks]):
            gone.append(blocks[tails])
            self.holds[blocks[tails]] = False
            blocks = blocks[~tails]
        if self._windows is not None:
            attached = self._windows.is_attached(blocks)
            gone.append(self._windows.detach(blocks[attached]))
            self.holds[gone[-1]] = False
            blocks = blocks[~attached]
        position = 0
        while position < len(blocks):
            first = blocks.item(position)
            if not self.holds.item(first):
                position += 1
                continue
            number, offset = divmod(self._places.item(first), _RUN)
            node = self._nodes[number]
            assert node is not None
            num_cut = len(node.blocks) - offset
            is_next = node.blocks[offset:].tobytes() == blocks[position : position + num_cut].tobytes()
            self._cut(node, offset, gone)
            position += num_cut if is_next else 1
        if not gone:
            return NO_INDICES
        forgotten = gone[0] if len(gone) == 1 else np.concatenate(gone)
        if self.partial is not None:
            self.partial.forget(forgotten)
        if self._checkpoints is not None:
            self._checkpoints.forget(forgotten)
        if self._windows is not None:
            detached = self._windows.forget(forgotten)
            self.holds[detached] = False
            return np.concatenate((forgotten, detached))
        return forgotten

    def attach(self, row: int, blocks: IndexArray, *, last_written: int | None = None) -> None:
        """Make a row's tail available to requests that share these cached blocks; see `WindowBlocks.attach`."""
        assert self._windows is not None
        self.holds[self._windows.attach(row, blocks, last_written=last_written)] = True

    def prove(self, root: BlockKey, keys: bytes, tokens: bytes, blocks: IndexArray) -> None:
        """Mark the blocks of a sequence that starts with `tokens` as proven, so that others can copy from them.

        A token was sampled from the sequence, and was finite.

        Args:
            root: the key before first blocks.
            keys: the joined keys of all full blocks of `tokens`, or more.
            tokens: int32. If the last block is not full, it becomes a tail. The sequence must have ended, and no other
                sequence may have that block.
            blocks: the blocks of `tokens`, in order.
        """
        assert self.partial is not None
        num_full = len(tokens) // self._width
        full = blocks[:num_full]
        fresh = full[self.holds[full] & ~self.partial.proven[full]]
        self.partial.prove(fresh)
        for block in fresh[self._places[fresh] % _RUN == 0].tolist():
            self._list(block, root)
        rest = tokens[self._width * num_full :]
        if len(rest) < TOKEN_BYTES * self.partial.least_tokens:
            return
        known = self._match_partial(root, keys, num_full, rest)
        if known is None or TOKEN_BYTES * known.num_tokens < len(rest):
            tail = int(blocks[num_full])
            assert not self.holds[tail]
            self.holds[tail] = True
            self.partial.add_tail(_key_before(root, keys, num_full), rest, tail)

    def match_partial(self, root: BlockKey, keys: bytes, num_found: int, tokens: bytes) -> PartialMatch | None:
        """Return the block to copy from after the first `num_found` blocks of a sequence, or None.

        Args:
            root: the key before first blocks.
            keys: the joined keys of at least these blocks.
            num_found: the number of blocks that `match` finds.
            tokens: the tokens after these blocks, int32, at most a block.
        """
        return self._match_partial(root, keys, num_found, tokens) if self.partial is not None else None

    def _match_partial(self, root: BlockKey, keys: bytes, number: int, tokens: bytes) -> PartialMatch | None:
        return self._facts.partial(self._find_partial(root, keys, number, tokens))

    def _find_partial(self, root: BlockKey, keys: bytes, number: int, tokens: bytes) -> PartialMatch | None:
        assert self.partial is not None
        match = self.partial.find(_key_before(root, keys, number), tokens)
        node, offset, depth, _ = self._walk(keys[: KEY_BYTES * number])
        if depth < number or offset == len(node.blocks) or not self.partial.proven[node.blocks[offset]]:
            return match
        # The match ends inside a run of blocks, so only the next block of that run can continue it.
        num_tokens = num_common(node.tokens[self._width * offset : self._width * (offset + 1)], tokens)
        if num_tokens < self.partial.least_tokens or (match is not None and match.num_tokens >= num_tokens):
            return match
        return PartialMatch(int(node.blocks[offset]), num_tokens)

    def _list(self, block: int, root: BlockKey) -> None:
        """Index a proven block that begins a run, because several such blocks can follow the same predecessor."""
        node = self._nodes[self._places.item(block) // _RUN]
        assert self.partial is not None
        assert node is not None
        parent = self._nodes[node.parent]
        assert parent is not None
        self.partial.list(parent.keys[-KEY_BYTES:] or root, node.tokens[: self._width], block)

    def doubt(self, blocks: IndexArray) -> None:
        """Mark shareable blocks as doubted, because a request that shared them has failed."""
        self.doubted[blocks[self.holds[blocks]]] = True

    def computes_next(self, row: int, key: BlockKey) -> None:
        """Record the key of the block that the row computes next; empty if others cannot share this block."""
        known = self._next_keys.pop(row, b"")
        if known:
            count = self._pending.pop(known)
            if count > 1:
                self._pending[known] = count - 1
        if key:
            self._next_keys[row] = key
            self._pending[key] = self._pending.get(key, 0) + 1

    def is_pending(self, key: BlockKey) -> bool:
        """Return whether a row is about to compute the block with this key."""
        return key in self._pending

    def validate(self) -> None:
        """Check that tree and arrays agree."""
        seen: list[int] = []
        for number, node in enumerate(self._nodes):
            if node is None:
                assert number in self._unused
                continue
            assert node.number == number
            assert len(node.keys) == KEY_BYTES * len(node.blocks)
            assert len(node.tokens) == self._width * len(node.blocks)
            assert (number == _ROOT) == (node is self._root)
            assert node is self._root or len(node.blocks), "an empty run"
            for key, child in node.children.items():
                assert child.parent == number
                assert child.keys.startswith(key)
                assert self._nodes[child.number] is child
            assert (self._places[node.blocks] // _RUN == number).all()
            assert (self._places[node.blocks] % _RUN).tolist() == list(range(len(node.blocks)))
            seen += node.blocks.tolist()
        if self.partial is not None:
            self.partial.validate()
            assert self.holds[self.partial.proven].all()
            runs = [node.blocks[0] for node in self._nodes if node is not None and node is not self._root]
            listed = [block for block in runs if self.partial.proven[block]]
            assert sorted(listed) == np.flatnonzero(self.partial.listed & ~self.partial.tails).tolist()
            seen += np.flatnonzero(self.partial.tails).tolist()
        if self._windows is not None:
            self._windows.validate()
            every = np.arange(len(self.holds))
            seen += every[self._windows.is_attached(every)].tolist()
        assert sorted(seen) == np.flatnonzero(self.holds).tolist(), "a block is in two runs, or in none"
        assert self._pending == Counter(self._next_keys.values())
        assert self.holds[self.doubted].all()

    def _walk(self, keys: bytes) -> _Place:
        node, offset, position = self._root, 0, 0
        found: list[IndexArray] = []
        while position < len(keys):
            child = node.children.get(keys[position : position + KEY_BYTES])
            if child is None:
                break
            node, offset = child, _common(child.keys, keys, position)
            found.append(child.blocks[:offset])
            position += KEY_BYTES * offset
            if offset < len(child.blocks):
                break
        return node, offset, position // KEY_BYTES, found

    def _add(self, parent: _Node, keys: bytes, blocks: IndexArray, tokens: bytes, root: BlockKey) -> _Node:
        number = self._unused.pop() if self._unused else len(self._nodes)
        node = _Node(number, parent.number, keys, blocks, tokens, root)
        if number == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[number] = node
        parent.children[keys[:KEY_BYTES]] = node
        if parent is self._root and self._directory is not None:
            self._directory.add(keys[:KEY_BYTES], self._epoch)
        return node

    def _number(self, node: _Node, blocks: IndexArray, first: int) -> None:
        """Record that the blocks are those of `node` from index `first` on."""
        place = node.number * _RUN + first
        self._places[blocks] = np.arange(place, place + len(blocks))

    def _split(self, node: _Node, offset: int) -> None:
        """Move the blocks of `node` from `offset` on into a new child, which inherits its children."""
        children, node.children = node.children, {}
        tokens = node.tokens[self._width * offset :]
        below = self._add(node, node.keys[KEY_BYTES * offset :], node.blocks[offset:].copy(), tokens, node.root)
        below.children = children
        for child in children.values():
            child.parent = below.number
        self._truncate(node, offset)
        self._number(below, below.blocks, 0)
        if self.partial is not None and self.partial.proven[below.blocks[0]]:
            self._list(int(below.blocks[0]), b"")

    def _cut(self, node: _Node, offset: int, gone: list[IndexArray]) -> None:
        """Remove all blocks from index `offset` of `node` on, and all nodes below; append them to `gone`.

        This is not recursive, because prompts that branch off a long prompt at every block make the tree as deep as the
        long prompt has blocks.
        """
        below = [node]
        if offset:
            self._drop(node.blocks[offset:], gone)
            below, node.children = [*reversed(node.children.values())], {}
            self._truncate(node, offset)
        else:
            parent = self._nodes[node.parent]
            assert parent is not None
            del parent.children[node.keys[:KEY_BYTES]]
            if parent is self._root and self._directory is not None:
                self._directory.remove(node.keys[:KEY_BYTES], self._epoch)
        while below:
            node = below.pop()
            self._drop(node.blocks, gone)
            self._nodes[node.number] = None
            self._unused.append(node.number)
            below += reversed(node.children.values())

    def _drop(self, blocks: IndexArray, gone: list[IndexArray]) -> None:
        self.holds[blocks] = self.doubted[blocks] = False
        gone.append(blocks)

    def _truncate(self, node: _Node, offset: int) -> None:
        # Copy, because a view would retain the memory of every block that was ever in the run.
        node.keys, node.blocks = node.keys[: KEY_BYTES * offset], node.blocks[:offset].copy()
        node.tokens = node.tokens[: self._width * offset]


def _key_before(root: BlockKey, keys: bytes, number: int) -> BlockKey:
    """Return the key before block `number` of a sequence."""
    return keys[KEY_BYTES * (number - 1) : KEY_BYTES * number] if number else root


def _common(run: bytes, keys: bytes, position: int) -> int:
    """Return how many keys in `run` equal those in `keys` from byte `position` on.

    The first key is known to be equal.
    """
    if keys.startswith(run, position):
        return len(run) // KEY_BYTES
    # Each key depends on all earlier keys, so binary search finds the first difference.
    same, different = 1, min(len(run), len(keys) - position) // KEY_BYTES
    if keys.startswith(run[: KEY_BYTES * different], position):
        return different
    while different - same > 1:
        middle = (same + different) // 2
        start = KEY_BYTES * (middle - 1)
        if run[start : start + KEY_BYTES] == keys[position + start : position + start + KEY_BYTES]:
            same = middle
        else:
            different = middle
    return same
