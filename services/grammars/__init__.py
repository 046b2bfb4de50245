"""Grammars: each new grammar is compiled on trial before its request is queued.

* `trial_process` – a process that compiles grammars. If it crashes, the front end is not affected.
* `trial_compiler` – the client for that process, with separate lanes for cheap and expensive grammars.
* `checker` – validates the field and caches the results of trials.
"""
