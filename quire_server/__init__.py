"""The server's command line and its supervisor.

`cli` is the command `quire`. `serve` starts and restarts all processes of a service on one machine, and `batch` sends
the requests in a file. `entry` makes the packages of an installed server importable.
"""
