"""Exceptions of the core."""


class InvalidLimitsError(ValueError):
    """Limits that contradict each other; the message names them and the remedy."""


class ProtocolViolationError(Exception):
    """A worker's answer does not fit its plan, so no further message of the worker can be trusted."""
