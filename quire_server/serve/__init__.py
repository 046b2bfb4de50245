"""A whole service on one machine: the same processes as in a cluster, started and supervised by one process.

* `layout` lists the processes and their flags. `ports` and `runtime_dir` are resources that the processes share.
* `child` runs one process, and `output` forwards its output.
* `supervisor` starts, restarts and stops all processes. `restarts` decides about restarts, and `watchdog` detects
  hangs. `readiness` waits until the processes serve.
* `service` combines these modules, and `sample` prints a first example.
* `lifeline` runs in the children and ends them if the supervisor dies. `ranks` starts the followers of a worker with
  tensor parallelism.

The supervisor imports neither torch nor any of the services.
"""
