"""Flight recorder: a bounded record on disk of everything that the core was given and decided. On by default.

The core is a pure state machine, so its inputs are a complete record: `quire replay` runs the core over them and makes
the same plans. The loop only appends references to a list; a thread encodes and writes them a few times per second. A
full or slow disk ends the recording, never the service.

* `values`: what a record holds, as values; `tags`: keyed hashes in place of secrets.
* `tape`: collects the calls of a core, with all that it learnt from token ids.
* `encoding`, `decoding`: these values to the messages of record.proto and back, as differences.
* `segments`: files of checksummed frames; the ring of them.
* `snapshot`: the core's state as a tree of plain values, so that a replay can start at any segment.
* `recorder`: the thread; `replay`: the core run over a record.
* `step_view`: what the thread makes of the steps while somebody watches.
* `timeline`: a record as a trace of Perfetto; `perfetto`: the writer of such a trace.
* `worker_clock`: alignment of a worker's clock with the core's.
"""
