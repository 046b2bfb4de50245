"""What every process needs. Imports no service, and no torch.

* `config`, `config_sources`: settings, and where they come from; `model_path`: where a model's files are
* `sockets`, `curve`: ZeroMQ as Quire uses it, and who may speak on it; `ids`: incarnations and routing ids
* `frames`, `columns`, `versions`: what both ends of a protocol must agree on beside its messages
* `grammars`, `prefix_keys`: what two kinds of processes must compute alike
* `errors`: every error that a client may see
* `logging`, `telemetry`, `metrics`: what processes tell of themselves
* `pulse`, `process_watch`: whether a process still works, or has begun to die
"""
