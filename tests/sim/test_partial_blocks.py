"""Sharing by copying, in pool and cache: sequences come, are proven and go in any order, against what blocks hold."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.partial_blocks import PartialBlocks, num_common
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from shared.prefix_keys import KEY_BYTES, following_keys, root_key

NUM_BLOCKS = 10
BLOCK_SIZE = 4

Tokens = tuple[int, ...]


class Sequence:
    """A sequence in a block table."""

    def __init__(self, root: bytes, tokens: Tokens, blocks: IndexArray) -> None:
        self.root, self.tokens, self.blocks = root, tokens, blocks
        self.keys = following_keys(root, _text(tokens), BLOCK_SIZE)


def _text(tokens: Tokens) -> bytes:
    return np.array(tokens, np.int32).tobytes()


class PartialBlocksMachine(RuleBasedStateMachine):
    """A pool whose cache shares parts of blocks; the machine tracks which tokens' KV each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.partial = PartialBlocks(NUM_BLOCKS, BLOCK_SIZE)
        self.pool = BlockPool(NUM_BLOCKS, PrefixCache(NUM_BLOCKS, self.partial))
        self.content: dict[int, tuple[bytes, Tokens]] = {}
        """For each block: the scope, and all tokens up to the block's last one."""
        self.live: list[Sequence] = []
        self.read_until: dict[int, int] = {}
        """By block: the last step that copies from it."""
        self.last_step = self.answered = 0

    roots = st.sampled_from([root_key("model", scope) for scope in (b"a", b"b")])
    sequences = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)

    @rule(root=roots, tokens=sequences)
    def admit(self, root: bytes, tokens: Tokens) -> None:
        """Admit a sequence: it shares blocks, copies the longest matching prefix of the next one, and gets the rest.

        The source of the copy is not allocated before the copy is answered.
        """
        cache, shareable = self.pool.cache, len(tokens) - 1
        keys = following_keys(root, _text(tokens), BLOCK_SIZE)[: KEY_BYTES * (shareable // BLOCK_SIZE)]
        shared = cache.match(keys)
        start = BLOCK_SIZE * len(shared)
        wanted = tokens[start : min(start + BLOCK_SIZE, shareable)]
        match = cache.match_partial(root, keys, len(shared), _text(wanted))
        longest = max((self.agrees(block, root, tokens[:start], wanted) for block in self.copyable()), default=0)
        assert (match.num_tokens if match else 0) == (longest if longest >= self.partial.least_tokens else 0)
        source = np.array([match.block] if match else [], np.intp)
        num_new = -(-len(tokens) // BLOCK_SIZE) - len(shared)
        idle = self.pool.count_idle(shared) + self.pool.count_idle(source)
        if num_new > self.pool.num_available - idle:
            return
        self.pool.share(shared)
        self.last_step += 1
        if match:
            assert self.agrees(match.block, root, tokens[:start], wanted) == match.num_tokens
            self.pool.read(source, last_step=self.last_step, answered_step=self.answered)
            self.read_until[match.block] = self.last_step
        taken = self.pool.take(num_new)
        for block in taken.tolist():
            assert self.read_until.get(block, 0) <= self.answered, "a block that is being copied is handed out"
            assert not self.partial.proven[block]
        blocks = np.concatenate((shared, taken))
        for number, block in enumerate(blocks.tolist()):
            self.content[block] = (root, tokens[: BLOCK_SIZE * (number + 1)])
        self.live.append(Sequence(root, tokens, blocks))

    def copyable(self) -> list[int]:
        """Blocks that can be copied from."""
        copyable: list[int] = np.flatnonzero(self.partial.proven).tolist()
        return copyable

    def agrees(self, block: int, root: bytes, before: Tokens, wanted: Tokens) -> int:
        """How many of the tokens `wanted` after `before` the block holds the KV of."""
        scope, tokens = self.content[block]
        if (
            scope != root
            or (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE != len(before)
            or tokens[: len(before)] != before
        ):
            return 0
        count = 0
        for mine, other in zip(tokens[len(before) :], wanted, strict=False):
            if mine != other:
                break
            count += 1
        return count

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def publish(self, data: st.DataObject) -> None:
        """The step that writes a sequence is sent: its full blocks are shareable, and nothing is copied from them."""
        sequence = data.draw(st.sampled_from(self.live))
        before = self.copyable()
        self.publish_all(sequence)
        assert self.copyable() == before

    def publish_all(self, sequence: Sequence) -> None:
        """Publishes all full blocks."""
        num_full = len(sequence.tokens) // BLOCK_SIZE
        text = _text(sequence.tokens[: BLOCK_SIZE * num_full])
        self.pool.cache.publish(sequence.keys, sequence.blocks[:num_full], text)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def prove(self, data: st.DataObject) -> None:
        """A sequence samples: its shareable full blocks can then be copied from."""
        sequence = data.draw(st.sampled_from(self.live))
        num_full = len(sequence.tokens) // BLOCK_SIZE
        tokens = sequence.tokens[: BLOCK_SIZE * num_full]
        self.pool.cache.prove(sequence.root, sequence.keys, _text(tokens), sequence.blocks[:num_full])
        full = sequence.blocks[:num_full]
        assert self.partial.proven[full].tolist() == self.pool.cache.holds[full].tolist()

    @rule(data=st.data(), proven=st.booleans())
    @precondition(lambda self: self.live)
    def end(self, data: st.DataObject, proven: bool) -> None:
        """A sequence ends; if it has sampled, its last block, or another one instead, can be copied from."""
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        num_full, rest = divmod(len(sequence.tokens), BLOCK_SIZE)
        if proven:
            self.publish_all(sequence)
            self.pool.cache.prove(sequence.root, sequence.keys, _text(sequence.tokens), sequence.blocks)
            wanted = sequence.tokens[-rest:] if rest else ()
            before = sequence.tokens[: BLOCK_SIZE * num_full]
            assert rest == 0 or rest in {self.agrees(block, sequence.root, before, wanted) for block in self.copyable()}
        self.pool.release(sequence.blocks, last_step=self.last_step, answered_step=self.answered)

    @rule()
    @precondition(lambda self: self.answered < self.last_step)
    def answer(self) -> None:
        """The oldest step in flight is answered."""
        self.answered += 1
        self.pool.step_answered(self.answered)

    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        """Mark blocks that no sequence shares as invalid: they are neither shared nor copied any more."""
        alone = [block for block in range(NUM_BLOCKS) if sum(block in s.blocks for s in self.live) <= 1]
        blocks = data.draw(st.lists(st.sampled_from(alone), unique=True)) if alone else []
        gone = [sequence for sequence in self.live if any(block in sequence.blocks for block in blocks)]
        for sequence in gone:
            self.live.remove(sequence)
            self.pool.release(sequence.blocks, last_step=self.last_step, answered_step=self.answered)
        self.pool.distrust(np.array(blocks, np.intp))
        assert not self.pool.cache.holds[blocks].any()
        assert not self.partial.proven[blocks].any()

    @invariant()
    def agrees_with_the_tables(self) -> None:
        """Pool and cache are sound, and what can be copied from is kept."""
        self.pool.validate(sequence.blocks.tolist() for sequence in self.live)
        assert self.pool.cache.holds[self.partial.proven].all()


TestPartialBlocks = PartialBlocksMachine.TestCase


def test_agreement_is_counted_in_whole_tokens() -> None:
    """Tokens that share some of their bytes differ."""
    some, other = _text((1, 2, 3, 256)), _text((1, 2, 3, 512))
    assert num_common(some, other) == 3
    assert num_common(some, _text((2,))) == 0
    assert num_common(some, some[:8]) == num_common(some[:8], some) == 2
    assert num_common(some, b"") == 0
