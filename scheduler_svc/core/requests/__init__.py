"""One request: its tokens and limits, its service account, and the log that is retained after its end.

* `request` – a request from arrival to end; `accounts` – the tenant and class to which its service is charged.
* `kept`, `resumable` – logs of requests whose clients may return; `history` – recent requests' histories.
"""
