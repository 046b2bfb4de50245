"""Flight recorder: a bounded record on disk of everything that the core was given and decided. On by default.

The core is a pure state machine, so its inputs are a complete record: `quire replay` runs the core over them and makes
the same plans. The loop only appends references to a list; a thread encodes and writes them a few times per second. A
full or slow disk ends the recording, never the service.

* `tags`: keyed hashes in place of secrets.
* `tape`: collects the calls of a core, with all that it learnt from token ids.
* `encoding`: these calls to the messages of record.proto, as differences.
* `segments`: files of checksummed frames; the ring of them.
* `snapshot`: the core's state as a tree of plain values, so that a replay can start at any segment.
* `recorder`: the thread.
* `step_view`: what the thread makes of the steps while somebody watches.
* `worker_clock`: alignment of a worker's clock with the core's.

The package `records` reads what is written here.
"""
