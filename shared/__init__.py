"""Code that every process uses. Imports no service, and no torch.

* `config`, `config_sources`: settings and their sources; `model_path`: location of a model's files
* `sockets`, `curve`: ZeroMQ sockets, and their encryption and authentication; `ids`: incarnations and routing ids
* `frames`, `columns`, `packing`, `versions`: what both ends of a protocol must agree on besides its messages
* `grammars`, `prefix_keys`, `kv_sizes`: computations that two kinds of processes must do alike
* `errors`: every error that a client may see; `json_text`: descriptions of JSON errors
* `logging`, `telemetry`, `metrics`, `otlp_metrics`: logs, traces and metrics of processes, and their export
* `metric_names`, `span_names`: every metric, span and attribute; `cpu_time`: CPU time of another process
* `pulse`, `process_watch`: detection of hanging and dying processes
"""
