"""The front end: what clients touch. gRPC and HTTP in, token columns of the scheduler core out again as text.

One request passes the modules in this order: `boundary` (bytes to message) → `servicer` → `generation` → `validation` →
`chat`, `tokenizer` → `stream` → `core_link` (`outgoing`) → `core_socket` → the core; its tokens come back `core_socket`
→ `core_link` (`incoming`) → `stream` (`detokenizer`, `stop_strings`, `outbox`) → `delivery` → `servicer` → the client;
what goes wrong leaves through `errors`. `embeddings`, `batch` and `resuming` are the other ways in, `http` is another
protocol for all of them.

What these modules lean on, in reading order:

* `context`: what every call works with; `principals`: who calls, and what they may; `calls`: how many may at once;
* `scheduling`, `grammars`: fields that `validation` leaves to them; `prompts`: from words to token ids, with
  `chat_template`; `texts`: Tokenize and Detokenize; `tokenizer_archive`: the same for whoever tokenises elsewhere;
* `logprobs`, `wakeup`: parts of a stream; `collect`: its messages as one; `tracing`: its span;
* `servicer_model`, `servicer_admin`, `servicer_health`, `servicer_vllm`: the other gRPC services.

`frontend` is the process around it (`tls`, `metrics`), and `bench` measures it.

Nothing here imports torch or transformers.
"""
