"""What the core promises about requests, plans and limits, checked from outside as things happen.

* `book` – where every stream is; `base` – what a promise is; `watch` – all of them, told of everything in order.
* `limits`, `admissions` – what one plan may hold; `waits`, `ends` – how long a request waits and why it ends.
* `queues`, `quotas` – what a tenant and the queue may have; `blame` – who is suspected when workers die.
* `eligible` – whether a request could start; on it rest `order`, `passing`, `work` (no idleness) and `fairness`.
* `drains` – what a drain moves; `sizes` – how much the core remembers; `evictions` – what stays cached;
  `effort` – how many requests it looks at.
"""
