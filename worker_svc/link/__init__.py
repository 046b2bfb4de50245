"""The connection to the scheduler. No other part of the worker knows protobuf or a socket.

* `decoding` – from messages of the scheduler to values, checked against the worker's limits.
* `session` – the plan protocol of one incarnation (pure: no socket, no clock).
* `identity` – the name of the worker, and what it tells the scheduler about itself.
* `encoding` – from values to messages for the scheduler.
* `connection` – the socket; one incarnation per Hello.
"""
