"""The matrix of foreign clients and features: `make clients`.

Each folder below this one is an environment: a lock file, and a program `client.py` or `client.mjs` that tries the
features of its clients with a running service and writes one JSON line per feature. `probe.py` and `probe.mjs` contain
the programs' shared code. `__main__` serves the models, runs the programs and writes the table.
"""
