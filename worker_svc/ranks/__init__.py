"""Tensor parallelism: a group of ranks, one process each, that serves as one worker.

Every rank has a part of each weight matrix, of the KV heads and of the vocabulary (`shard`). Within a step the ranks
add up and exchange activations and scores (`group`). Rank 0 has the link to the scheduler and broadcasts each plan to
the other ranks, its *followers* (`commands`). Every rank applies the same plans to the same row table, so all of them
call the same collectives in the same order. A rank that is lost ends the others, and with them the worker.

* `shard` – the part of a rank.
* `group` – collectives over gloo and NCCL, and how the ranks find each other.
* `commands` – what rank 0 tells its followers.
"""
