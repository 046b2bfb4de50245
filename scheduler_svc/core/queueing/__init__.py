"""The waiting requests: their order, their quotas, and the worker on which each will run.

* `policies` – admission orders; `service_ledger` – the service that each tenant has received, for `fair`.
* `tenants` – tenant quotas.
* `forecast` – when a request will start and end; `output_lengths`, `calibration` – measurements for the forecast.
* `backlog` – owns the queued requests, which have credit; `holding` – requests that wait for an event.
* `placement` – finds the worker that can serve a request at the least cost.
"""
