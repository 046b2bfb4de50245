"""Explains why a request was slow: divides its end-to-end time into causes, from the record.

The modules, in this order:

* `facts` – facts about one request's life: its notes, its workers' steps, and its front end's report;
* `accounting` – divides the life into causes, without I/O;
* `advice` – one sentence about what would have helped;
* `page` – the explanation as text and as JSON;
* `reading` – reads lives from a record; `answers` – answers the queries of `quire explain`.
"""
