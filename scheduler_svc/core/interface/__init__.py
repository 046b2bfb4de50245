"""Input and output of the scheduler core, as values.

* `records` – a request as it arrives and as it ends, shared by events and effects; `arrays` – the array types.
* `events`, `effects`, `plan` – the arguments and results of `Scheduler.handle` and `Scheduler.plan`.
* `config` – the limits that steer decisions; `errors` – exceptions for messages that violate the protocol.

These modules decide nothing and import no other part of the core.
"""
