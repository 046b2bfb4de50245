"""Prefix sharing by hash-chained full blocks (vLLM's automatic prefix caching), held as a radix tree (SGLang).

The key of a block stands for everything before it as well, so all that is cached forms a tree of keys. A node is a run
of keys without a branch and the blocks that hold their KV. Prompts have hundreds of blocks; a run is found by one
look-up and compared by one `memcmp`, and no block has a Python object of its own.

A block is shareable as soon as the step that writes it has been sent: plans are executed in order, and within a step
every layer writes the whole batch's KV before it attends. A block that nobody holds stays in the cache until its memory
is needed; the least recently used goes first, and of a chain the end before the beginning (see `BlockPool`). What
follows a block that is forgotten could not be found any more, so it is forgotten as well.

While a prompt is being computed, the key of the block that its row computes next is *pending*. A request with the same
prefix finds everything before it in the cache, and waits at exactly that key instead of computing it a second time.
"""

from collections.abc import Container

import numpy as np

from scheduler_svc.core.arrays import NO_INDICES, IndexArray, any_of
from scheduler_svc.core.partial_blocks import PartialBlocks, PartialMatch, num_common
from shared.frames import TOKEN_BYTES
from shared.prefix_keys import KEY_BYTES, BlockKey

_RUN = 1 << 32
"""More than any run has blocks."""
_ROOT = 0
"""Number of the node that everything begins at; it is its own parent."""


class _Node:
    """A run of keys, joined, and their blocks; with their tokens, where parts of blocks are shared."""

    __slots__ = ("blocks", "children", "keys", "number", "parent", "tokens")

    def __init__(self, number: int, parent: int, keys: bytes, blocks: IndexArray, tokens: bytes) -> None:
        self.number = number
        self.parent = parent
        """By number: a node that referred to it would keep the tree of a lost worker until a collection."""
        self.keys = keys
        self.blocks = blocks
        self.tokens = tokens
        self.children: dict[BlockKey, _Node] = {}
        """By the first key of each."""


_Place = tuple[_Node, int, int, list[IndexArray]]
"""How far a chain of keys is in the tree: the node of the last block that was found, how many of its blocks were found,
how many blocks were found in all, and these."""


class PrefixCache:
    """Which block holds the KV of which key, for one worker in one epoch."""

    def __init__(self, num_blocks: int, partial: PartialBlocks | None = None) -> None:
        """Without `partial`, full blocks are all that is shared."""
        self.partial = partial
        self._width = 0 if partial is None else TOKEN_BYTES * partial.block_size
        """Bytes of tokens that are kept per block."""
        self._root = _Node(_ROOT, _ROOT, b"", NO_INDICES, b"")
        self._nodes: list[_Node | None] = [self._root]
        self._unused: list[int] = []
        """Numbers that no node has."""
        self._places = np.zeros(num_blocks, np.int64)
        """For blocks that are held here: the number of their node times `_RUN`, plus their index in it."""
        self._pending: dict[int, BlockKey] = {}
        """By row in prefill: the key of the block that it computes next."""
        self.holds = np.zeros(num_blocks, np.bool_)
        """Whether a block is shareable, or a tail that can be copied from; to be read only."""

    @property
    def first_keys(self) -> Container[BlockKey]:
        """The keys with which something begins that is here: whoever starts with another one finds nothing."""
        return self._root.children

    def match(self, keys: bytes) -> IndexArray:
        """The blocks of the longest cached prefix of the joined `keys`."""
        _, _, _, found = self._walk(keys)
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else NO_INDICES

    def publish(self, keys: bytes, blocks: IndexArray, tokens: bytes = b"") -> None:
        """Makes a chain of blocks shareable, except where other blocks have the keys already.

        Args:
            keys: the joined keys of the chain, from the first block of the sequence on.
            blocks: as many blocks.
            tokens: theirs, int32, if parts of blocks are shared.
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
            node = self._add(node, keys, blocks, tokens)
        self._number(node, blocks, first)
        self.holds[blocks] = True

    def forget(self, blocks: IndexArray) -> IndexArray:
        """The blocks' memory is needed, or their content cannot be trusted.

        Args:
            blocks: in any order; of a chain best from the beginning on.

        Returns:
            all blocks that are held here no longer: those that were, and what followed them.
        """
        gone: list[IndexArray] = []
        if self.partial is not None and any_of(tails := self.partial.tails[blocks]):
            gone.append(blocks[tails])
            self.holds[blocks[tails]] = False
            blocks = blocks[~tails]
        while len(blocks):
            first = blocks.item(0)
            if self.holds.item(first):
                number, offset = divmod(self._places.item(first), _RUN)
                node = self._nodes[number]
                assert node is not None
                self._cut(node, offset, gone)
                if gone[-1].tobytes() == blocks.tobytes():
                    break
            blocks = blocks[self.holds[blocks]]
        if not gone:
            return NO_INDICES
        forgotten = gone[0] if len(gone) == 1 else np.concatenate(gone)
        if self.partial is not None:
            self.partial.forget(forgotten)
        return forgotten

    def prove(self, root: BlockKey, keys: bytes, tokens: bytes, blocks: IndexArray) -> None:
        """A token was sampled from a sequence that begins with `tokens`: from now on its blocks can be copied from.

        Args:
            root: the key before first blocks.
            keys: the joined keys of all full blocks of `tokens`, or more.
            tokens: int32. If the last block is not full it becomes a tail: the sequence has ended and nobody else has
                that block.
            blocks: as many as `tokens` need.
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
        """The block to copy from after `num_found` blocks of a sequence were found, if there is one.

        Args:
            root: the key before first blocks.
            keys: the joined keys of at least these blocks.
            num_found: as many as `match` finds.
            tokens: int32, those that follow them, at most a block.
        """
        return self._match_partial(root, keys, num_found, tokens) if self.partial is not None else None

    def _match_partial(self, root: BlockKey, keys: bytes, number: int, tokens: bytes) -> PartialMatch | None:
        assert self.partial is not None
        match = self.partial.find(_key_before(root, keys, number), tokens)
        node, offset, depth, _ = self._walk(keys[: KEY_BYTES * number])
        if depth < number or offset == len(node.blocks) or not self.partial.proven[node.blocks[offset]]:
            return match
        # The sequence ends within a run: the run's next block follows.
        num_tokens = num_common(node.tokens[self._width * offset : self._width * (offset + 1)], tokens)
        if num_tokens < self.partial.least_tokens or (match is not None and match.num_tokens >= num_tokens):
            return match
        return PartialMatch(int(node.blocks[offset]), num_tokens)

    def _list(self, block: int, root: BlockKey) -> None:
        """A proven block begins a run: there may be several with the same predecessor, so it is to be found by that."""
        node = self._nodes[self._places.item(block) // _RUN]
        assert self.partial is not None
        assert node is not None
        parent = self._nodes[node.parent]
        assert parent is not None
        self.partial.list(parent.keys[-KEY_BYTES:] or root, node.tokens[: self._width], block)

    def computes_next(self, row: int, key: BlockKey) -> None:
        """The row computes the block with this key next; empty: none that others could share."""
        if key:
            self._pending[row] = key
        else:
            self._pending.pop(row, None)

    def is_pending(self, key: BlockKey) -> bool:
        """Whether a row computes the block with this key next."""
        return key in self._pending.values()

    def validate(self) -> None:
        """Checks that tree and arrays agree."""
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
        assert sorted(seen) == np.flatnonzero(self.holds).tolist(), "a block is in two runs, or in none"

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

    def _add(self, parent: _Node, keys: bytes, blocks: IndexArray, tokens: bytes) -> _Node:
        number = self._unused.pop() if self._unused else len(self._nodes)
        node = _Node(number, parent.number, keys, blocks, tokens)
        if number == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[number] = node
        parent.children[keys[:KEY_BYTES]] = node
        return node

    def _number(self, node: _Node, blocks: IndexArray, first: int) -> None:
        """The blocks are those of `node` from index `first` on."""
        place = node.number * _RUN + first
        self._places[blocks] = np.arange(place, place + len(blocks))

    def _split(self, node: _Node, offset: int) -> None:
        """Makes the blocks of `node` from `offset` on a child of it, which inherits its children."""
        children, node.children = node.children, {}
        tokens = node.tokens[self._width * offset :]
        below = self._add(node, node.keys[KEY_BYTES * offset :], node.blocks[offset:], tokens)
        below.children = children
        for child in children.values():
            child.parent = below.number
        self._truncate(node, offset)
        self._number(below, below.blocks, 0)
        if self.partial is not None and self.partial.proven[below.blocks[0]]:
            self._list(int(below.blocks[0]), b"")

    def _cut(self, node: _Node, offset: int, gone: list[IndexArray]) -> None:
        """Takes everything from block `offset` of `node` on out of the tree; appends the blocks to `gone`.

        Not by recursion: prompts that leave a long one at every block make the tree as deep as that one is long.
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
        while below:
            node = below.pop()
            self._drop(node.blocks, gone)
            self._nodes[node.number] = None
            self._unused.append(node.number)
            below += reversed(node.children.values())

    def _drop(self, blocks: IndexArray, gone: list[IndexArray]) -> None:
        self.holds[blocks] = False
        gone.append(blocks)

    def _truncate(self, node: _Node, offset: int) -> None:
        node.keys, node.blocks = node.keys[: KEY_BYTES * offset], node.blocks[:offset]
        node.tokens = node.tokens[: self._width * offset]


def _key_before(root: BlockKey, keys: bytes, number: int) -> BlockKey:
    """The key of the block before block `number` of a sequence."""
    return keys[KEY_BYTES * (number - 1) : KEY_BYTES * number] if number else root


def _common(run: bytes, keys: bytes, position: int) -> int:
    """How many keys of `run` are those of `keys` from byte `position` on; the first one is known to be."""
    if keys.startswith(run, position):
        return len(run) // KEY_BYTES
    # A key stands for all before it, so the first difference can be searched for by halving.
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
