"""Benchmarks of the front end, `quire bench frontend`, and of traces, `python -m measure.frontend.tracing`.

`frontend` and `tracing` run the scenarios. `child` starts their processes, which are the other modules: `client`,
`echo_core` in place of a scheduler, and `servicer_bare_echo`, the baseline. Tests of the front end use `echo_core` as
well.
"""
