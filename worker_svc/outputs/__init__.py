"""Each row's output: how its tokens are sampled, and what is returned with them.

* `sampling_columns` – temperature, top-k, top-p, min-p and seed of each row, as arrays.
* `logits` – penalties, biases, allowed and forbidden tokens.
* `grammars` – compiled grammars, and the tokens that a grammar allows next.
* `scores` – log-probabilities of sampled tokens and prompt tokens.
* `pooling` – embeddings for rows that pool instead of sampling.
"""
