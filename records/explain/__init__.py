"""Explains why a request was slow: divides its end-to-end time into causes, from the record.

The modules, in this order:

* `facts` – what is known about one request's life: its notes, the steps on its workers, the report from its front end;
* `accounting` – divides the life into causes, without I/O;
* `advice` – one sentence on what would have helped;
* `page` – the explanation as text and as JSON;
* `reading` – reads lives from a record; `answers` – answers the questions of `quire explain`.
"""
