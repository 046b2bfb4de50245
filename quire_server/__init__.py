"""The server's command line and its supervisor.

`cli` is the command `quire`. `serve` starts and restarts all processes of a service on one machine. `batch` sends the
requests in a file. `entry` makes an installed server's packages importable.
"""
