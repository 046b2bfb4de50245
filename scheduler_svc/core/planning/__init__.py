"""The next step of a worker, and what its answer means.

* `planner` – builds a plan: decodes first, then prompts in chunks, then new requests.
* `batch_selection` – which waiting requests a plan takes in; `victims` – whom it preempts for an urgent one.
* `block_allocation` – blocks for rows that decode on, and preemption when there are none.
* `results` – what an answered step means for its requests; `row_failures` – what it means when rows failed.
* `delivery` – tokens for front ends.
"""
