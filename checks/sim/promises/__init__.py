"""The core's promises about requests, plans and limits, checked from outside at every event.

* `book` – the place of every stream; `base` – the base class for promises; `watch` – calls all promises in order.
* `limits`, `admissions` – what one plan may contain; `waits`, `ends` – how long a request waits and why it ends;
  `refusals` – whether a refusal by deadline was justified.
* `sessions` – which new sessions wait for memory, and how long.
* `queues`, `quotas` – limits of the queue and of tenants; `blame` – which requests are suspects after a death.
* `keys` – bounds on policy keys; `prompts` – how a step's prompt tokens are shared.
* `eligible` – whether a request could start; `order`, `passing`, `work` (no idle worker) and `fairness` use it.
* `drains` – which requests a drain moves; `victims` – which requests are preempted.
* `sizes` – the core's memory use; `evictions` – which blocks stay cached; `effort` – how many requests a plan examines.
"""
