"""The KV cache of one worker: which blocks are free, held, cached or retired, and what cached blocks contain.

* `block_pool` – owns every block: allocates it, counts its references, and frees it once no step reads it.
* `recency` – the cached blocks by last use, for eviction.
* `prefix_cache` – the tree that says which block holds which prefix; `partial_blocks` – the blocks worth a copy.
* `prefix_directory` – which workers have the first block of a prompt.
* `swapping` – blocks in host memory, and when a copy costs less than computing the tokens again.
"""
