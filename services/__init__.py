"""Front end: gRPC and HTTP servers that tokenise requests, pass them to the scheduler core and stream text back.

Read the packages in this order; each imports only those before it:

* `errors` – from an error to the status that a client sees; `metrics` – what the process counts.
* `tail` – which calls are traced although they were not sampled.
* `access` – who calls, and how many calls at a time: principals, TLS, the limit of concurrent calls.
* `text` – text and conversations to token ids, and token ids to text.
* `parsers` – a model's output to reasoning, content and tool calls, one incremental parser per family of models.
* `grammars` – compiles new grammars on trial, in a process that may die.
* `requests` – one request: checked fields, scheduling options, prompts as token ids.
* `streams` – one stream between the core and its reader, without I/O.
* `link` – the socket to the core and its protocol.
* `calls` – calls, independent of their protocol: generate, embed, resume, tokenise; its span; delivery to a reader.
* `grpc` – the gRPC services.
* `http` – OpenAI's API, probes and metrics over HTTP.
* `frontend` – the process around all of this: start and shutdown.

One request passes them as follows: `grpc.boundary` (bytes to message) → `grpc.generation` → `calls.generation` →
`requests.validation` → `requests.prompts` → `streams.stream` → `link.core_link` → the core. Its tokens come back
through `link.core_link` → `streams.stream` → `calls.delivery` → `grpc.generation` → the client.

Nothing here imports torch or transformers.
"""
