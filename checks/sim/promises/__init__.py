"""The core's promises about requests, plans and limits, checked from outside at every event.

* `book` – the place of every stream; `base` – the base class of a promise; `watch` – all promises, called in order.
* `limits`, `admissions` – what one plan may contain; `waits`, `ends` – how long a request waits and why it ends;
  `refusals` – whether its deadline was a reason to refuse it.
* `queues`, `quotas` – the limits of the queue and of tenants; `blame` – which requests are suspects after a death.
* `keys` – bounds of the keys of policies; `prompts` – how the prompt tokens of a step are shared.
* `eligible` – whether a request could start; `order`, `passing`, `work` (no idle worker) and `fairness` use it.
* `drains` – which requests a drain moves; `victims` – which requests are preempted.
* `sizes` – how much memory the core uses; `evictions` – which blocks stay cached; `effort` – how many requests a plan
  looks at.
"""
