"""One request: its tokens and limits, the account for its service, and the log that is retained after its end.

* `request` – a request from arrival to end; `accounts` – the tenant and class that its service counts for.
* `kept`, `resumable` – the logs of requests whose clients may come back; `history` – what happened to recent requests.
"""
