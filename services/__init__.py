"""Front end: gRPC and HTTP servers that tokenise requests, pass them to the scheduler core and stream text back.

One request passes the modules in this order: `boundary` (bytes to message) → `servicer` → `generation` → `validation` →
`chat`, `tokenizer` → `stream` → `core_link` (`outgoing`) → `core_socket` → the core. Its tokens come back through
`core_socket` → `core_link` (`incoming`) → `stream` (`detokenizer`, `stop_strings`, `outbox`) → `delivery` → `servicer`
→ the client. Errors leave through `errors`. `embeddings`, `batch` and `resuming` are the other entry points; `http` is
the other protocol for all of them.

Supporting modules, in reading order:

* `context`: the objects that every call uses; `principals`: authentication and permissions; `calls`: limit of
  concurrent calls;
* `scheduling`, `grammars`: fields that `validation` does not check itself; `trial_compiler`: compiles grammars on trial
  in a separate process (`trial_process`); `prompts`: text to token ids, with `chat_template`; `texts`: Tokenize and
  Detokenize; `tokenizer_archive`: the tokenizer's files for clients that tokenise themselves;
* `logprobs`, `wakeup`: parts of a stream; `collect`: joins its messages into one answer; `tracing`: its span;
* `servicer_model`, `servicer_admin`, `servicer_health`, `servicer_vllm`: the other gRPC services.

`frontend` is the process around all of this (`tls`, `metrics`); `bench` measures it.

Nothing here imports torch or transformers.
"""
