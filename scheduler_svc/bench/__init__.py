"""Benchmarks of the scheduler.

`core` measures it alone, `journal` what writing it down costs, `link` the real process over real sockets, with
`echo_worker` and `token_sink` as its workers and front end.
"""
