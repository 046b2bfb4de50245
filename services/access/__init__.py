"""Access: authentication and call limits.

* `principals` – a bearer token or a client certificate becomes a principal with permissions.
* `tls` – certificates for both listeners, which are reloaded when they change on disk.
* `call_limit` – the limit on concurrent calls, over all protocols.
"""
