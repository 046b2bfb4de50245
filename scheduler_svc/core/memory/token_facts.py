"""Token facts: all information that the core derives from token ids for its decisions."""

from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.memory.partial_blocks import PartialMatch
from shared.prefix_keys import BlockKey, following_keys


class TokenFacts:
    """Computes the facts from the tokens. A recorder notes them, and a replay returns recorded ones."""

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
        """Return whether a rare condition on token values holds."""
        return condition
