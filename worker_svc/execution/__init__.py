"""Executes one step, from the row table to the result.

* `decode_graphs` – decode steps as captured CUDA graphs.
* `batch` – builds the flat batch of a step from the row table.
* `executor` – runs the step, synchronously on a CPU and asynchronously on an accelerator.
* `host_tokens` – copies the last tokens to the host, for rows whose next token depends on them.
* `sampler` – turns logits into tokens.
* `tracing` – spans of steps and rows.
* `engine` – executes a plan with all of these, and returns its result.
* `profiling` – runs the largest possible step once on a GPU, to measure the memory of a step without KV.
* `step_sizes` – default limits for a device and a model, and the largest step to capture.
* `assembly` – builds the engine for a loaded model.
"""
