"""Simulation: the production core against model workers, clients, network and clock, all drawn from one seed.

How it works. `scenario.draw(seed)` decides everything about a world; `Simulation.run` lets it happen in virtual time.
The core is driven through `handle`, `plan`, `take_effects`, `next_plan_due`, `stats`, `workers`, `validate` and `story`
only, and is not told that it is watched. A phase with faults is followed by one in which everything is healed and every
request must end. The same seed gives the same run, so a seed is all that is needed to replay a failure (TigerBeetle's
VOPR and FoundationDB's simulation are the models).

Read the modules in this order:

* `violation` – a promise that was not kept; `gaps` – those that are known not to be.
* `oracle` – arithmetic instead of a model; `model_worker` – a strict worker over it.
* `faults`, `scenario`, `traffic` – what is drawn: what goes wrong, the limits and sizes, the requests.
* `coverage` – what was seen; `agenda`, `world` – virtual time and what all parts share.
* `stream`, `clients` – requests as their front ends see them, and what they check; `returns` – clients that come back.
* `answers`, `sites`, `cluster` – workers, their links and epochs, and what is checked of them.
* `promises` – a package: what the core guarantees about requests, plans and limits, one class each.
* `simulation` – the loop and the two phases; `report` – its result in words; `campaign` – many seeds at once.
"""
