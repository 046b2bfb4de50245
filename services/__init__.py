"""Front end: gRPC and HTTP servers that tokenise requests, send them to the scheduler and stream text to clients.

Read the packages in this order. Each package imports only the packages before it:

* `errors` – maps errors to the status that a client sees; `metrics` – metrics of this process.
* `tail` – selects unsampled calls to trace anyway.
* `access` – authentication and limits: principals, TLS, the limit on concurrent calls.
* `text` – text and conversations to token ids, and token ids to text.
* `parsers` – split a model's output into reasoning, content and tool calls; one incremental parser per model family.
* `grammars` – compile new grammars on trial, in a separate process.
* `requests` – one request: checked fields, scheduling options, prompts as token ids.
* `streams` – one stream between the core and its reader, without I/O.
* `link` – the socket to the core and its protocol.
* `calls` – protocol-independent calls (generate, embed, resume, tokenise), their spans, and delivery to the client.
* `grpc` – the gRPC services.
* `http` – OpenAI's API, probes and metrics over HTTP.
* `frontend` – the process around all of this: start and shutdown.

A request passes these modules: `grpc.boundary` (bytes to message) → `grpc.generation` → `calls.generation` →
`requests.validation` → `requests.prompts` → `streams.stream` → `link.core_link` → the core. Its tokens return through
`link.core_link` → `streams.stream` → `calls.delivery` → `grpc.generation` → the client.

The front end imports neither torch nor transformers.
"""
