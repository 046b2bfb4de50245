"""Link to the scheduler core.

* `core_socket` – the ZeroMQ socket on the event loop.
* `outgoing` – messages to the core, gathered over one turn of the event loop; `incoming` – token columns, by stream.
* `live_view` – what a caller of a live view has not read yet.
* `core_link` – the protocol: handshake, live streams, questions and their answers.
"""
