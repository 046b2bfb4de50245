"""Token facts: all information that the core derives from token ids for its decisions."""

from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.memory.partial_blocks import PartialMatch
from shared.prefix_keys import BlockKey, following_keys


class TokenFacts:
    """Computes the facts from the tokens. A recorder notes them, and a replay returns recorded ones."""

    def following_keys(self, parent: BlockKey, tokens: bytes, block_size: int) -> bytes:
        """Return the joined keys of the full blocks in `tokens` (int32) that follow `parent`."""
        return following_keys(parent, tokens, block_size)

    def partial(self, match: PartialMatch | None) -> PartialMatch | None:
        """Return the longest match between a request's next tokens and the start of a proven block."""
        return match

    def stopped(self, positions: IndexArray) -> IndexArray:
        """Return the positions of a step's rows whose tokens are stop tokens."""
        return positions

    def holds(self, condition: bool) -> bool:
        """Return whether a rare condition on token values holds."""
        return condition
