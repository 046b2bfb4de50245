"""Input and output of the scheduler core, as values.

* `records` – a request on arrival and at its end, shared by events and effects; `arrays` – the array types.
* `events`, `effects`, `plan` – the arguments and results of `Scheduler.handle` and `Scheduler.plan`.
* `config` – the limits that affect decisions; `errors` – exceptions for messages that violate the protocol.

These modules decide nothing and import no other part of the core.
"""
