"""What measures the front end: `quire bench frontend`.

`frontend` runs the scenarios; the other modules are its processes, which `child` starts: `client`, `echo_core` in place
of a scheduler, and `servicer_bare_echo`, the yardstick. Tests of the front end run it over `echo_core` as well.
"""
