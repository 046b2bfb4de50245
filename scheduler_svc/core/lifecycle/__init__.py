"""The life of a request, which is accepted or refused, waits, runs, and ends exactly once.

* `admission_control` – which requests may wait.
* `states` – the table of states and transitions, and the only module that writes a request's state.
* `registry` – owns all live requests, decides which transition an event causes, and ends requests.
* `timeouts` – finds requests whose deadline has passed; `statistics` – metrics about requests and workers.
"""
