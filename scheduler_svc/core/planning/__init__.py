"""A worker's next step, and the handling of step results.

* `planner` – builds a plan: decodes first, then prompts in chunks, then new requests.
* `batch_selection` – which waiting requests a plan admits; `victims` – which requests it preempts for an urgent one.
* `block_allocation` – blocks for rows that continue to decode, and preemption when there are none.
* `results` – applies a step result to its requests; `row_failures` – handles failed rows.
* `delivery` – tokens for front ends.
"""
