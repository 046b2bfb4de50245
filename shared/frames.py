"""Limits and versions on which both ends of an inter-process protocol must agree."""

from shared.versions import Versions

LINK_VERSIONS = Versions(oldest=1, newest=2)
"""Versions of the protocol between front ends and core. 2: embeddings."""
PLAN_VERSIONS = Versions(oldest=4, newest=4)
"""Versions of the protocol between scheduler and workers. 3: embeddings. 4: sampling parameters as bytes."""
PLAN_MAX_MESSAGE = 64 << 20
"""Maximum frame between scheduler and worker, bytes; ZeroMQ closes a connection that receives a larger frame."""
LINK_MAX_MESSAGE = 16 << 20
"""Maximum frame between front end and core, bytes."""
PACKED_BYTES = LINK_MAX_MESSAGE // 4
"""Parts are packed into a shared frame up to this size, bytes; a larger part has its own frame."""
MAX_PART_BYTES = LINK_MAX_MESSAGE - PACKED_BYTES
"""Maximum part of a frame between front end and core, bytes. A request with all its future tokens is one part."""
MAX_SERVED_SEQUENCE = 1 << 20
"""Maximum served sequence length, tokens, for any model; it ensures that all tokens fit into one part."""
MAX_STEP_TOKENS = 1 << 17
"""Maximum number of tokens per step; it ensures that their log-probabilities fit into the step's result."""
MAX_STEP_VECTOR_BYTES = PLAN_MAX_MESSAGE // 2
"""Maximum size of the embeddings that one step completes, bytes, so that they fit into its answer."""
MAX_LOGPROBS = 20
"""Maximum number of most likely tokens with log-probabilities per position, in addition to the chosen token."""
MAX_SEQUENCE = 1 << 30
"""Maximum plausible sequence length of a model, tokens; keeps int32 counters from overflowing."""
MAX_VOCABULARY = 1 << 24
"""Maximum plausible vocabulary size."""
MAX_GRAMMARS = 256
"""Number of unused compiled grammars that a worker caches. The scheduler decides which ones it evicts."""
TOKEN_BYTES = 4
"""Credit that one token costs, bytes: its size in a column."""


class MalformedFrameError(ValueError):
    """A frame cannot be parsed, or its parts are inconsistent. The receiver counts, logs and drops the frame."""


class FrameTooLargeError(ValueError):
    """A frame exceeds the limit of its socket; the message names the largest request in it."""
