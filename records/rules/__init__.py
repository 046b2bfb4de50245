"""The rules of the plan protocol, as programs that check them.

`replayed` serves the requests of a recording again and checks every plan and effect. `model_worker` executes plans
without a model: it checks every plan against the rules and knows the KV of every token. `oracle` defines the tokens,
scores and embeddings that it samples. `violation` is the error of a broken rule. They are independent of the code of
core and worker, so that they find its mistakes.
"""
