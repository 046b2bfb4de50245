"""Benchmark of the front end: `quire bench frontend`.

`frontend` runs the scenarios. The other modules are its processes, which `child` starts: `client`, `echo_core` in place
of a scheduler, and `servicer_bare_echo`, the baseline. Tests of the front end use `echo_core` as well.
"""
