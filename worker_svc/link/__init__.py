"""The connection to the scheduler: identity, protocol and socket.

* `identity` – the name of the worker.
* `session` – the plan protocol of one incarnation (pure: no socket, no clock).
* `connection` – the socket; one incarnation per Hello.
"""
