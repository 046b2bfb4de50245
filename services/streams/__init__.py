"""One stream, from the tokens of the core to the text for the client, without I/O.

* `logprobs` – converts log-probabilities from the worker's columns to the public message.
* `parts` – sizes of parser events, for clients that resume.
* `outbox` – released output that the client has not read.
* `stream` – the state of the stream.
"""
