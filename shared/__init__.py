"""Code that every process uses. This package imports no service and no torch.

* `config`, `config_sources`: settings and their sources; `model_path`: location of a model's files
* `sockets`, `curve`: ZeroMQ sockets, and their encryption and authentication; `ids`: incarnations and routing ids
* `frames`, `columns`, `packing`, `versions`: limits and encodings on which both ends of a protocol must agree
* `grammars`, `prefix_keys`, `kv_sizes`: computations that must give the same result in two kinds of processes
* `errors`: every error that a client may see; `json_text`: descriptions of JSON errors
* `logging`, `telemetry`, `metrics`, `otlp_metrics`: logs, traces and metrics of processes, and their export
* `metric_names`, `span_names`: every metric, span and attribute; `cpu_time`: CPU time of another process
* `pulse`, `process_watch`: detection of hanging and dying processes
"""
