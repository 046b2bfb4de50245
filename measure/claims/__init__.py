"""The claims of the articles on batching, checked: `python -m measure.claims` writes docs/strategies.md.

Modules, in reading order: `virtual` (studies with the real scheduler on simulated devices), `live` (studies with the
real service and with transformers), `computed` (arithmetic), `parts` (the studies by name, and their JSON file),
`table` (claims and verdicts, from the results), `page` (docs/strategies.md). Only `virtual`, `live` and
`parts` run anything.
"""
