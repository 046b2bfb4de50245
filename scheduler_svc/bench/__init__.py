"""Benchmarks of the scheduler: the core alone (`core`) and over real sockets (`link`)."""
