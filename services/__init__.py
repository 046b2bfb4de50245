"""The front end: what clients touch. gRPC and HTTP in, token columns of the scheduler core out again as text.

One request passes the modules in this order: `handlers` (bytes to message) → `servicer` → `validation` → `tokenizer` →
`stream` → `core_link` → the core; its tokens come back `core_link` → `stream` (`detokenizer`, `stop_strings`, `outbox`)
→ `servicer` → the client. `frontend` is the process around it. Nothing here imports torch or transformers.
"""
