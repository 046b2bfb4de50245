"""One worker in one epoch, and the fleet of workers.

* `rows` – a worker's running requests as arrays; `steps_in_flight` – its plans without a result.
* `cached_prefixes` – what its caches hold of a request, in three tiers; `prefix_publisher` – what its rows add to them.
* `worker` – one worker, which combines these with its blocks.
* `capacity`, `batching`, `chunks` – how much memory an admission must leave, when a batch opens, how long a chunk is.
* `cost_model` – predicted step times; `plan_timing`, `plan_schedule` – which workers need a plan now.
* `kinds` – which workers can serve a request.
* `grammars` – the grammars that a worker has compiled; `quarantine` – requests that may have killed a worker;
  `trials` – their steps alone.
* `fleet` – which workers may join, and which are declared lost.
"""
