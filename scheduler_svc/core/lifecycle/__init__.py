"""The life of a request: it is accepted or refused, waits, runs, and ends exactly once.

* `registry` – owns all live requests and is the only way out; `admission_control` – which requests may wait at all.
* `timeouts` – the requests whose time is up; `statistics` – figures of requests and workers.
"""
