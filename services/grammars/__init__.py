"""Grammars: each new grammar is compiled on trial before its request is queued.

* `trial_process` – the process that compiles grammars; a crash in it does not affect the front end.
* `trial_compiler` – its client, with one lane for cheap grammars and one for expensive ones.
* `checker` – validates the field and caches the results of trials.
"""
