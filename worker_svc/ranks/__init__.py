"""Tensor parallelism: a group of ranks, one process each, serves as one worker.

Every rank has a part of each weight matrix, of the KV heads and of the vocabulary (`shard`). Within a step the ranks
add up and exchange activations and scores (`group`). Rank 0 has the link to the scheduler and broadcasts each plan to
the other ranks, its *followers* (`commands`). Every rank applies the same plans to the same row table, so all ranks
call the same collectives in the same order. If a rank is lost, the other ranks exit, and thus the worker exits.

* `shard` – the part of a rank.
* `group` – collectives over gloo and NCCL, and how the ranks find each other.
* `capture` – graphs that all ranks capture, or none.
* `gpu_locks` – the order of workers that start on the same GPUs.
* `commands` – commands from rank 0 to its followers.
"""
