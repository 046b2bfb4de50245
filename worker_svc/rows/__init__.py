"""The row table: the state of every sequence on the worker, which each plan updates.

* `block_tables` – the blocks of each row, on the host and on the device.
* `history` – all known tokens of each row, if the worker speculates.
* `table` – all other row state; checks and applies a plan's changes.
"""
