"""Code that every process uses. This package imports no service and no torch.

* `config`, `config_sources`: settings and their sources; `model_path`: the location of a model's files
* `sockets`, `curve`: ZeroMQ sockets, and their encryption and authentication; `ids`: incarnations and routing ids
* `frames`, `columns`, `packing`, `versions`: limits and encodings that both ends of a protocol must share
* `grammars`, `prefix_keys`, `kv_sizes`: computations that must yield the same result in different processes
* `errors`: all errors that a client may see; `json_text`: descriptions of JSON errors
* `logging`, `telemetry`, `metrics`, `otlp_metrics`: logs, traces and metrics of processes, and their export
* `metric_names`, `span_names`: every metric, span and attribute; `cpu_time`: CPU time of another process
* `pulse`, `process_watch`: detection of hanging and dying processes
"""
