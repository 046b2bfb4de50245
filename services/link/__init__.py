"""Link to the scheduler core.

* `core_socket` – the ZeroMQ socket on the event loop.
* `outgoing` – messages to the core, collected during one turn of the event loop; `incoming` – token columns, by stream.
* `live_view` – buffer of a live view for its caller.
* `core_link` – the protocol: handshake, live streams, questions and their replies.
"""
