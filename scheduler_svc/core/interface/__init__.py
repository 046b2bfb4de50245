"""Input and output of the scheduler core, as values.

* `records` – a request as it arrives and as it ends, shared by events and effects; `arrays` – the array types.
* `events`, `effects`, `plan` – the arguments and results of `Scheduler.handle` and `Scheduler.plan`.
* `config` – the limits that steer decisions; `errors` – what is raised for a message that breaks the protocol.

Nothing here decides anything, and nothing here imports another part of the core.
"""
