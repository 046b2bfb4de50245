"""Token facts: everything that decisions learn from the values of token ids.

The core's decisions depend on token ids in four ways only: the keys of full blocks, the length of a partial match, the
rows whose token is a stop token, and a few rare conditions such as a token outside the vocabulary. All of them pass
through one object of this class. A record of these results therefore replays every decision without any token id: see
`scheduler_svc.recorder`.
"""

from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.memory.partial_blocks import PartialMatch
from shared.prefix_keys import BlockKey, following_keys


class TokenFacts:
    """The facts as computed from the tokens; a recorder notes them, and a replay returns recorded ones."""

    def following_keys(self, parent: BlockKey, tokens: bytes, block_size: int) -> bytes:
        """Return the joined keys of the full blocks of `tokens` (int32) that follow `parent`."""
        return following_keys(parent, tokens, block_size)

    def partial(self, match: PartialMatch | None) -> PartialMatch | None:
        """Return the longest match of a request's next tokens with the beginning of a proven block."""
        return match

    def stopped(self, positions: IndexArray) -> IndexArray:
        """Return the positions of the rows of a step whose tokens are stop tokens."""
        return positions

    def holds(self, condition: bool) -> bool:
        """Return whether a condition on token values holds that nearly never does."""
        return condition
