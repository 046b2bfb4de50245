"""The rules of the plan protocol, as programs that check them.

`replayed` serves the requests in a recording again and checks every plan and effect. `model_worker` executes plans
without a model: it checks every plan against the rules and tracks the KV of every token. `oracle` defines the tokens,
scores and embeddings that `model_worker` samples. `violation` is the error for a broken rule. These modules share no
code with the core or the worker, so that they detect mistakes in that code.
"""
