"""Error of an invalid plan."""


class PlanError(ValueError):
    """A plan that violates the plan protocol.

    The row table may be partly updated, so the worker must drop all rows and send a new Hello. The message is one line
    and contains no prompt content.
    """
