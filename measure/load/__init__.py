"""Load generation and measurement: `quire bench offline`, `quire bench serve` and `quire bench sweep`.

Modules without I/O, in reading order: `arrivals` (when requests begin), `workloads` and `traces` (request lengths),
`prompts` (prompt contents), `plan` (a whole run), `outcomes` (results per request), `figures` and `server`
(statistics), `search` and `advice` (conclusions of a sweep), `svg`, `report`, `html` and `sweep` (presentation).

Modules with side effects: `grpc_target` and `http_target` (over `http1`) send one request, `generator` begins each at
its time, `run` carries out a plan in one or several processes.
"""
