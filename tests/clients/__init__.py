"""The matrix of foreign clients and features: `make clients`.

Each folder below this one is an environment: a locked list of packages, and a program `client.py` or `client.mjs` that
tries the features of its clients against a running service and writes one JSON line for each. `probe.py` and
`probe.mjs` are what these programs share. `__main__` serves the models, runs the programs and writes the table.
"""
