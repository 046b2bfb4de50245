"""Values that all parts of the worker share: what comes in, what goes out, and the limits in between.

* `arrays` – the array types of these values.
* `limits` – what the worker can hold and compute.
* `plan` – one step of work, as the link has decoded and checked it.
* `grammar` – a grammar to compile, and what became of it.
* `result` – the answer to a plan.
* `errors` – the error of an invalid plan.

Nothing here knows the wire format, a device or a model.
"""
