"""Calls, independent of their protocol.

* `tracing` – the call's span; `context` – the objects that every call uses, and the live requests.
* `parts` – converts parser results to public messages.
* `wakeup`, `delivery` – a request's streams to its reader, at the reader's speed.
* `resuming` – streams restored from the core's log.
* `generation`, `embeddings`, `scoring`, `texts` – the calls: generate, embed, compare texts, tokenise and detokenise.
* `together` – the parts of one call concurrently.
* `load_reports` – the load of the service, in responses, for load balancers.
* `collect` – joins streamed messages into a single response.
"""
