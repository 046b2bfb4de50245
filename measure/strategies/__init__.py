"""`quire bench strategies`: the same requests under static, dynamic and continuous batching, on the real engine.

Modules, in reading order: `bounds` (the fewest possible steps), `cases` (requests and settings), `occupancy` (steps,
slots and blocks, from the flight record), `measure` (runs one case), `claims` (claims in the literature and our
results), `other_work` (CPU time of other programs), `report` (table, JSON, HTML and the page docs/strategies.md). Only
`measure` starts processes.
"""
