"""What-if replay: the requests of a flight record, served again in a simulation with other settings.

The scheduler's core is the real one. Only the workers, the link and the clients are simulated. The time of a step is
predicted by a model that is learned from the same record.

The modules, in this order:

* `figures` – throughput, latencies and occupancy of a run, recorded or simulated;
* `rows` – which rows of a worker compute what in a step;
* `acceptance` – which drafts are accepted;
* `load` – the requests and workers of a run, as values; `arrivals` – reads them from a record;
* `step_times` – the model of step times, learned by regression;
* `saved` – settings, workers, step times and acceptance as a file; `settings` – the changed settings;
* `simulate` – the event loop over the core;
* `page` – the comparison as text and as JSON; `answer` – the whole question of `quire replay --set`;
* `strategies` – the last minutes under static, dynamic and continuous batching, for the console.

Only `answer` and `strategies` open files.
"""
