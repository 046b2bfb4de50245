"""The scheduler service: `core/` decides, everything around it moves bytes.

`core` is a pure state machine (no socket, clock, thread or torch). `service` is the loop that feeds it events from two
ZeroMQ ROUTERs (`frontend_link`, `worker_link`) and carries its effects and plans out again.
"""
