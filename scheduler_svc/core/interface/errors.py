"""Exceptions of the core."""


class InvalidLimitsError(ValueError):
    """Contradictory limits; the message names them and the remedy."""


class ProtocolViolationError(Exception):
    """A worker's result does not match its plan, so no later message from the worker can be trusted."""
