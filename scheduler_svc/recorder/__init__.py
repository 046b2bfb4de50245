"""Flight recorder: a bounded record on disk of all inputs and decisions of the core. On by default.

The core is a pure state machine, so its inputs are a complete record: `quire replay` runs the core on them and makes
the same plans. The loop only appends references to a list. A thread encodes and writes them a few times per second. A
full or slow disk stops the recording but never the service.

* `tags`: keyed hashes that replace secrets.
* `tape`: collects the calls of a core, with all facts about token ids.
* `encoding`: converts these calls to delta-encoded messages of record.proto.
* `segments`: files of checksummed frames, and the ring of these files.
* `snapshot`: the core's state as a tree of plain values, so that a replay can start at any segment.
* `recorder`: the thread.
* `step_view`: builds live views of the steps while an operator watches.
* `worker_clock`: alignment of a worker's clock with the core's.

The package `records` reads what is written here.
"""
