"""Grammars: each new one is compiled on trial before its request is queued.

* `trial_process` – the process that compiles; a grammar may crash it without harm.
* `trial_compiler` – its client, with one lane for cheap grammars and one for expensive ones.
* `checker` – checks the field, and remembers the results of trials.
"""
