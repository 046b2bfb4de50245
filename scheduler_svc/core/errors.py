"""What the core raises."""


class InvalidLimitsError(ValueError):
    """Limits that contradict each other; the message names them and the remedy."""


class ProtocolViolationError(Exception):
    """A worker's answer does not fit its plan; the worker cannot be trusted any further."""
