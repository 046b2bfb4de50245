"""The server's command line and its supervisor.

`cli` is the command `quire`. `serve` starts and restarts all processes of a service on one machine, `batch` sends files
of requests, and `bench` measures through the client. `entry` makes an installed server's packages importable.
"""
