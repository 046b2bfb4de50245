"""Values that all parts of the worker share: inputs, outputs and limits.

* `arrays` – the array types of these values.
* `limits` – limits on memory and computation.
* `plan` – one step of work, as the link has decoded and checked it.
* `grammar` – a grammar to compile, and the result of its compilation.
* `result` – the result of a plan.
* `errors` – the error of an invalid plan.

These modules do not depend on the wire format, a device or a model.
"""
