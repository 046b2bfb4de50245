"""What-if replay: serves the requests in a flight record again, in a simulation with other settings.

The scheduler core is the real one. Only the workers, the link and the clients are simulated. The time of a step is
predicted by a model that is learned from the same record.

The modules, in this order:

* `figures` – throughput, latencies and occupancy of a run, recorded or simulated;
* `rows` – tracks a worker's rows and each row's work in a step;
* `acceptance` – decides which drafts are accepted;
* `load` – a run's requests and workers, as values; `arrivals` – reads them from a record;
* `step_times` – the model of step times, learned by regression;
* `saved` – settings, workers, step times and acceptance as a file; `settings` – the changed settings;
* `simulate` – the event loop over the core;
* `page` – the comparison as text and JSON; `answer` – the whole of `quire replay --set`;
* `strategies` – the last minutes under static, dynamic and continuous batching, for the console.

Only `answer` and `strategies` open files.
"""
