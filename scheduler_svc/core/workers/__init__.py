"""One worker in one epoch, and the fleet of workers.

* `rows` – a worker's running requests as arrays; `worker` – its rows, blocks and steps in flight.
* `capacity`, `batching`, `chunks` – how much memory an admission must leave, when a batch opens, how long a chunk is.
* `cost_model` – predicted step times; `plan_timing`, `plan_schedule` – which workers need a plan now.
* `kinds` – which workers can serve a request.
* `grammars` – the grammars that a worker has compiled; `quarantine` – requests that may have killed a worker.
* `fleet` – which workers may join, and which are declared lost.
"""
