"""The connection to the scheduler. No other part of the worker uses protobuf or sockets.

* `decoding` – converts messages of the scheduler to values, and validates them against the worker's limits.
* `session` – the plan protocol of one incarnation, without socket and clock.
* `identity` – the name of the worker, and its description for the scheduler.
* `encoding` – converts values to messages for the scheduler.
* `connection` – the socket, with one incarnation per Hello.
"""
