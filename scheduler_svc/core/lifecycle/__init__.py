"""The life of a request: it is accepted or refused, waits, runs, and ends exactly once.

* `admission_control` – which requests may wait at all.
* `states` – the table of states and transitions, and the only module that writes a request's state.
* `registry` – owns all live requests, decides which transition an event causes, and is the only way out.
* `timeouts` – the requests whose time is up; `statistics` – numbers of requests and workers.
"""
