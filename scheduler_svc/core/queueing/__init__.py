"""The waiting requests: in which order, within which quotas, and on which worker they will run.

* `policies` – the orders of admission; `service_ledger` – the service that each tenant has had, for `fair`.
* `tenants` – quotas of tenants; `forecast` – what a request will probably cost.
* `backlog` – owns all waiting requests; `holding` – those that cannot start until something happens.
* `placement` – finds the worker that would serve a request at the least cost.
"""
