"""The front end: what clients touch. gRPC and HTTP in, token columns of the scheduler core out again as text.

One request passes the modules in this order: `boundary` (bytes to message) → `servicer` → `generation` → `validation` →
`chat`, `tokenizer` → `stream` → `core_link` (`outgoing`) → the core; its tokens come back `core_link` (`incoming`) →
`stream` (`detokenizer`, `stop_strings`, `outbox`) → `generation` → `servicer` → the client; what goes wrong leaves
through `errors`. `frontend` is the process around it.
`bench` measures it. Nothing here imports torch or transformers.
"""
