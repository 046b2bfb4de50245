"""Journal: a log on disk from which resumable requests continue after a restart of the scheduler. Off by default.

The core decides which requests to keep, and for how long (`LogBegun`, `LogEnded`, `LogDropped`). The service passes
these effects and the tokens to the journal, which appends them to a file before the turn's messages are sent to front
ends. A client therefore never has a token that is not in the journal. After a restart, the next scheduler reads the
journal and passes the requests to the core for `Resume`. A request is computed again only when its client resumes it.

* `book`: the state that a sequence of batches describes. Writer and reader share this code.
* `segments`: files with batches as frames; detects incomplete frames.
* `syncer`: flushes files to the disk (fsync) in its own thread.
* `recovery`: reads the journal of an earlier process.
* `journal`: combines them: writes batches and deletes old segments.
"""
