"""The front end: what clients touch. gRPC and HTTP in, token columns of the scheduler core out again as text.

One request passes the modules in this order: `boundary` (bytes to message) → `servicer` → `generation` → `validation` →
`chat`, `tokenizer` → `stream` → `core_link` (`outgoing`) → `core_socket` → the core; its tokens come back `core_socket`
→ `core_link` (`incoming`) → `stream` (`detokenizer`, `stop_strings`, `outbox`) → `delivery` → `servicer` → the client;
what goes wrong leaves through `errors`. `embeddings`, `batch` and `resuming` are the other ways in, `http` is another
protocol for all of them. `frontend` is the process around it, and `bench` measures it.

Nothing here imports torch or transformers.
"""
