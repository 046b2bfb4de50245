"""What can go wrong with a step as a whole."""


class PlanError(ValueError):
    """A plan that breaks the protocol's contract.

    The row table may be half changed: drop every row and say Hello again. The message is one
    line without prompt content.
    """
