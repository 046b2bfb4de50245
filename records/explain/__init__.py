"""Why one request was slow: from the record to causes whose durations sum to its end-to-end time.

The modules, in this order:

* `facts` – what is known of one request's life: its notes, the steps on its workers, the report of its front end;
* `accounting` – divides the life into causes, without I/O;
* `advice` – one sentence on what would have helped;
* `page` – the explanation as text and as JSON;
* `reading` – from a record to lives; `answers` – the questions of `quire explain`.
"""
