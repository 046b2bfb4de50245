"""Arena for scheduling policies: real schedulers under the same load, in virtual time, with the same cost per step.

A workload generates jobs. One loop submits them to a scheduler, runs its steps on simulated devices, and records every
token. The loop, the devices, the jobs and the metrics are the same for every scheduler. Only the engine differs:
Quire's core in this process, or a peer's scheduler in a separate environment. Modules, in reading order: `jobs`,
`costs`, `workloads`, `engine`, `quire_engine`, `arena`, `metrics`, `schedulers`, `report`.
"""
