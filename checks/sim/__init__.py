"""Simulation of the production core with model workers, clients, network and clock, all drawn from one seed.

`scenario.draw(seed)` determines a simulation completely, and `Simulation.run` executes it in virtual time. The
simulation calls only the public methods of the core: `handle`, `plan`, `next_plan_due`, `stats`, `workers`, `validate`
and `story`. The core cannot detect that it is simulated. A first phase injects faults. A second phase repairs
everything, and every request must end. The same seed gives the same run, so a seed replays a failure. TigerBeetle's
VOPR and FoundationDB's simulation are the models.

Read the modules in this order:

* `records.rules` – the error for a broken promise; arithmetic that replaces the model; a worker that checks every
  protocol rule.
* `gaps` – promises that are known to be broken.
* `faults`, `scenario`, `traffic` – values generated from the seed: faults, limits and sizes, requests; `aims` – adapts
  every second scenario to a rare situation.
* `coverage` – counts of what happened; `agenda`, `world` – virtual time and the state shared by all parts.
* `stream`, `clients` – requests as their front ends see them; `returns` – clients that reconnect; `journalling` – the
  journal from which a restarted core recovers their requests.
* `answers`, `sites`, `cluster` – workers, their links and epochs, and the checks on them.
* `wire` – the codecs of the links.
* `promises` – the guarantees of the core about requests, plans and limits, one class each.
* `twins` – comparisons of two simulations with the same load; `watchdog` – the time limit of a step.
* `simulation` – the loop and the two phases; `report` – the result as text; `campaign` – many seeds in parallel.
"""
