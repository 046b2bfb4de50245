"""Load generation and measurement: `quire bench offline`, `quire bench serve` and `quire bench sweep`.

Pure modules, in reading order: `arrivals` (when requests begin), `workloads` and `traces` (what they ask for),
`outcomes` (what came back), `figures` (statistics of it), `svg` (charts).
"""
