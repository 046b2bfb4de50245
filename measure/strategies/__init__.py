"""`quire bench strategies`: the same requests under static, dynamic and continuous batching, on the real engine.

Modules, in reading order: `bounds` (the fewest steps that lengths allow), `cases` (requests and settings), `occupancy`
(steps, slots and blocks, from the flight record), `measure` (runs one case), `claims` (claims of the literature and
the numbers), `other_work` (what other programs used), `report` (table, JSON, HTML and the page docs/strategies.md).
Only `measure` starts processes.
"""
