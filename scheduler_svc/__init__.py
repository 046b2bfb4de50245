"""The scheduler service: `core/` decides, everything around it moves bytes.

`core` is a pure state machine (no socket, clock, thread or torch). `service` is the loop that feeds it events from two
ZeroMQ ROUTERs (`frontend_hub`, `worker_hub`; `frontend_link` and `worker_link` know what frames mean) and carries its
effects and plans out again. `journal` writes down what must outlive it, `operator`, `metrics` and `tracing` tell of it,
`admission_file` reads limits of tenants, `assembly` turns the configuration into parts of the service; `main` is the
process around it (`collector` keeps its garbage collector quiet). `sim` runs the core in simulated worlds, `bench`
measures it.
"""
