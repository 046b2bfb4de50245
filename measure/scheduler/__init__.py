"""Benchmarks of the scheduler.

`core` measures the core alone, and `journal` the cost of the journal. `link` measures the scheduler process over real
sockets, with `echo_worker` as its workers and `token_sink` as its front end.
"""
