"""The KV cache: its size, its tensors, and the copies of its blocks.

* `kv_pool` – number of KV blocks that fit into memory, and their tensors.
* `profiling` – runs the largest possible step once on a GPU to measure the memory of a step besides KV.
* `block_copies` – copies between device blocks.
* `swap` – host memory for the KV of preempted requests, and the copies to it and back.
"""
