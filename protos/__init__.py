"""Every message that crosses a process or its end, as Protocol Buffers, and nothing else.

`quire/v1` is the public API; its generated code lives in the package `quire.v1`, which clients install. `quire/plan/v1`
(scheduler and worker), `quire/link/v1` (front end and scheduler core) and `quire/journal/v1` (the scheduler's journal)
are internal; their generated code lies beside the proto files. `make protos` generates all of it, `make protos-check`
fails when it is stale.
"""
