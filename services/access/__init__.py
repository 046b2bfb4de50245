"""Access: who calls, and how many calls at a time.

* `principals` – a bearer token or a client certificate becomes a principal with permissions.
* `tls` – certificates of both listeners, which are reloaded when they change on disk.
* `call_limit` – the limit of concurrent calls, over all protocols.
"""
