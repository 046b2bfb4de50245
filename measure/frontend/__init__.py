"""Benchmarks for the front end (`quire bench frontend`) and for tracing (`python -m measure.frontend.tracing`).

`frontend` and `tracing` run the scenarios. `child` starts their processes, which are the other modules: `client`,
`echo_core` (replaces the scheduler), and `servicer_bare_echo` (the baseline). Tests of the front end also use
`echo_core`.
"""
