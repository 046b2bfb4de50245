"""Limits and versions that both ends of an inter-process protocol must share."""

from shared.versions import Versions

LINK_VERSIONS = Versions(oldest=1, newest=2)
"""Versions of the protocol between front ends and core. Version 2 added embeddings."""
PLAN_VERSIONS = Versions(oldest=5, newest=5)
"""Versions of the protocol between scheduler and workers. In version 5, window tables grow with their rows, and models
with recurrent state verify drafts.
"""
STANDBY_VERSIONS = Versions(oldest=2, newest=2)
"""Versions of the protocol between schedulers. Version 2 sends the position of each part."""
PLAN_MAX_MESSAGE = 64 << 20
"""Maximum frame between scheduler and worker, bytes; ZeroMQ closes a connection that receives a larger frame."""
LINK_MAX_MESSAGE = 16 << 20
"""Maximum frame between front end and core, bytes."""
PACKED_BYTES = LINK_MAX_MESSAGE // 4
"""Maximum size of a frame with several parts, bytes. A larger part gets a separate frame."""
MAX_PART_BYTES = LINK_MAX_MESSAGE - PACKED_BYTES
"""Maximum size of a part in a frame between front end and core, bytes.

A request with all its future tokens is one part.
"""
MAX_SERVED_SEQUENCE = 1 << 20
"""Maximum served sequence length of any model, tokens. It ensures that all tokens fit into one part."""
MAX_STEP_TOKENS = 1 << 17
"""Maximum number of tokens per step. It ensures that their log-probabilities fit into the step's result."""
MAX_STEP_VECTOR_BYTES = PLAN_MAX_MESSAGE // 2
"""Maximum total size of the embeddings completed in one step, bytes, so that they fit into its result."""
MAX_LOGPROBS = 20
"""Maximum number of most likely tokens with log-probabilities per position, in addition to the chosen token."""
MAX_SEQUENCE = 1 << 30
"""Maximum plausible sequence length of a model, tokens. It prevents overflows of int32 counters."""
MAX_VOCABULARY = 1 << 24
"""Maximum plausible vocabulary size."""
MAX_GRAMMARS = 256
"""Number of unused compiled grammars that a worker caches. The scheduler decides which of them are evicted."""
TOKEN_BYTES = 4
"""Credit that one token costs, bytes: its size in a column."""


class MalformedFrameError(ValueError):
    """A frame cannot be parsed, or its parts are inconsistent. The receiver counts, logs and drops the frame."""


class FrameTooLargeError(ValueError):
    """A frame exceeds its socket's limit. The message names the largest request in the frame."""
