"""Worker service: one process per device that executes the scheduler's plans over a paged KV cache.

The worker makes no decisions about requests or blocks. For each step, it receives one plan and returns one result. A
plan passes through these modules:

* `link` receives the frame, checks its place in the epoch, and decodes it into a value. `loop` passes the value to the
  engine.
* `rows` checks the plan against its rows and applies the changes. `memory` makes the copies of the plan.
* `execution` builds the batch, calls the `model`, samples as `outputs` describes, and collects the result.
* `loop` passes the result to `link`, which encodes and sends it.

Read the packages in this order. Each package imports only the packages before it:

* `interface` – plans, results and limits, as plain values.
* `device` – choice of the device, streams, events, copies to the device, and state on the device.
* `ranks` – tensor parallelism: the part of a rank, collectives, and commands from rank 0 to the others.
* `model` – decoders that compute logits over the paged KV cache.
* `memory` – the KV cache: size, tensors, copies between blocks, and host memory.
* `outputs` – the output options of each row: sampling parameters, rules, grammars, log-probabilities, embeddings.
* `rows` – the row table, which each plan updates.
* `speculation` – draft tokens that a decode step verifies.
* `execution` – one step: batch, forward pass, sampling, result.
* `link` – the connection to the scheduler; only this package knows protobuf.
* `loop` – passes plans from the link to the engine and results back.
* `follower` – the loop of all ranks except rank 0.
* `main` – the process: configuration, model, KV cache, signals, exit code.

The worker may import `shared`, `protos` and `kernels`, never the scheduler or the front end.
"""
