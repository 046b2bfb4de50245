"""The waiting requests: in which order, within which quotas, and on which worker they will run.

* `policies` – the orders of admission; `service_ledger` – the service that each tenant has had, for `fair`.
* `tenants` – quotas of tenants.
* `forecast` – when a request will start and end; `output_lengths`, `calibration` – what it is learned from.
* `backlog` – owns the queued requests, which have credit; `holding` – those of them that wait for an event.
* `placement` – finds the worker that would serve a request at the least cost.
"""
