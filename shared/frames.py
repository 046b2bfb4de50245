"""What both ends of an inter-process protocol must agree on beside its messages."""

from shared.versions import Versions

LINK_VERSIONS = Versions(oldest=1, newest=2)
"""Of the protocol between front ends and core. 2: embeddings."""
PLAN_VERSIONS = Versions(oldest=2, newest=3)
"""Of the protocol between scheduler and workers. 3: embeddings."""
MAX_SEQUENCE = 1 << 30
"""Longest sequence of a model that is believed, tokens: what is counted in int32 stays clear of its end."""
MAX_VOCABULARY = 1 << 24
"""Largest vocabulary that is believed."""
TOKEN_BYTES = 4
"""What one token costs of a stream's credit: its place in a column."""


class MalformedFrameError(ValueError):
    """A frame that does not parse, or whose parts do not fit together. It is counted, logged and dropped."""
