"""Values that several tests of the worker share."""

from worker_svc.interface.limits import Limits

LIMITS = Limits(
    max_rows=4, max_tokens_per_step=32, max_model_len=64, block_size=8, num_blocks=36, vocab_size=24, num_host_blocks=4
)
"""Limits of a small worker."""
