"""The KV cache: its size, its tensors, and copies of its blocks.

* `kv_pool` – the number of KV blocks that fit into memory, and their tensors.
* `kv_groups` – which layers share a block table; `kv_views` – their tensors and tables if layers differ in size.
* `block_copies` – copies between device blocks.
* `disk_tier` – the thread that copies between host memory and disk; `disk_files` – the files.
* `swap` – host memory for the KV of preempted requests, and copies between device and host.
"""
