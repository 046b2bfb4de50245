"""Load generation and measurement: `quire bench offline`, `quire bench serve` and `quire bench sweep`.

Pure modules, in reading order: `arrivals` (when requests begin), `workloads` and `traces` (what they ask for),
`prompts` (as which prompts), `plan` (a whole run), `outcomes` (what came back), `figures` and `server` (statistics of
it), `search` and `advice` (what a sweep concludes), `svg`, `report`, `html` and `sweep` (how it is shown).

Modules that act: `grpc_target` and `http_target` (over `http1`) send one request, `generator` begins each at its time,
`run` carries out a plan in one or several processes.
"""
