"""Simulation of the production core with model workers, clients, network and clock, all drawn from one seed.

`scenario.draw(seed)` determines a simulation completely, and `Simulation.run` executes it in virtual time. The
simulation calls only the public methods of the core: `handle`, `plan`, `next_plan_due`, `stats`, `workers`, `validate`
and `story`. The core cannot detect that it is simulated. After a phase with faults, a second phase repairs everything,
and every request must end. The same seed gives the same run, so a seed replays a failure. TigerBeetle's VOPR and
FoundationDB's simulation are the models.

Read the modules in this order:

* `records.rules` – a broken promise; arithmetic instead of a model; a worker that checks every rule of the protocol.
* `gaps` – promises that are known to be broken.
* `faults`, `scenario`, `traffic` – the values drawn from the seed: faults, limits and sizes, requests; `aims` –
  adaptations of every second scenario to rare situations.
* `coverage` – counts of what happened; `agenda`, `world` – virtual time and the state that all parts share.
* `stream`, `clients` – requests as their front ends see them; `returns` – clients that reconnect; `journalling` – the
  journal from which a restarted core gets their requests back.
* `answers`, `sites`, `cluster` – workers, their links and epochs, and the checks on them.
* `wire` – the codecs of the links.
* `promises` – the guarantees of the core about requests, plans and limits, one class each.
* `twins` – comparisons of two simulations of one load; `watchdog` – the time limit of a step.
* `simulation` – the loop and the two phases; `report` – the result as text; `campaign` – many seeds in parallel.
"""
