"""The whole system on one machine: the same processes that a cluster runs, started and watched by one.

`layout` says which processes with which flags, `ports` and `runtime_dir` what they share, `child` runs one (`output`
passes on what it writes), `supervisor` starts, restarts and ends all of them (`restarts` decides, `watchdog` finds who
hangs), `readiness` waits until they serve, `service` puts these together, `sample` is what a newcomer sees, `lifeline`
is the children's side. The supervisor imports neither torch nor any of the services.
"""
