"""Values that all parts of the worker share, and the error of an invalid plan.

* `limits` – what the worker can hold and compute.
* `errors` – the error of an invalid plan.
"""
