"""Benchmarks of the scheduler.

`core` measures the core alone, `journal` the cost of the journal, and `link` the scheduler process over real sockets,
with `echo_worker` and `token_sink` as its workers and front end.
"""
