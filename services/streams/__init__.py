"""One stream, between the core that sends its tokens and the reader that takes its text. No I/O.

* `logprobs` – log-probabilities, from the worker's columns to the public message.
* `parts` – sizes of what a parser has found, for clients that resume.
* `outbox` – output that was released and not yet read.
* `stream` – the state of the stream: tokens in, text out, its end.
"""
