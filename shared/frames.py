"""What both ends of an inter-process protocol must agree on beside its messages."""

LINK_PROTOCOL_VERSION = 1
"""Version of the protocol between front ends and core; both sides must speak the same."""
PLAN_PROTOCOL_VERSION = 2
"""Version of the protocol between scheduler and workers; both sides must speak the same."""
TOKEN_BYTES = 4
"""What one token costs of a stream's credit: its place in a column."""


class MalformedFrameError(ValueError):
    """A frame that does not parse, or whose parts do not fit together. It is counted, logged and dropped."""
