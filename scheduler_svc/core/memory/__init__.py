"""One worker's KV cache: which blocks are free, held, cached or retired, and what cached blocks contain.

* `block_pool` – owns every block: allocates it, counts its references, and frees it once no step reads it.
* `recency` – the cached blocks by last use, for eviction.
* `prefix_cache` – a tree that maps prefixes to blocks; `partial_blocks` – blocks of which copying a part is useful.
* `prefix_directory` – which workers have the first block of a prompt.
* `host_states` – places in host memory for the recurrent states of preempted requests.
* `swapping` – blocks in host memory: the KV of preempted requests, and cached blocks; `disk_space` – cached blocks on
  disk; `host_pool` and `host_keys` – the blocks of both, and their content.
"""
