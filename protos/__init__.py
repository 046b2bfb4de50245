"""Messages between the processes, and those that outlive a process, as Protocol Buffers; nothing else.

`quire/v1` and `quire/admin/v1` are the public API; their generated code lives in the package `quire`, which clients
install. `quire/plan/v1` (scheduler and worker), `quire/link/v1` (front end and scheduler core) and `quire/journal/v1`
(the scheduler's journal) are internal; their generated code is next to the proto files. `make protos` generates all of
it, `make protos-check` fails when it is stale.
"""
