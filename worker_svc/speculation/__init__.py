"""Speculative decoding: draft tokens that a decode step verifies in addition to its own token.

* `drafts` – the drafts of one step, and the choice of the rows and numbers of drafts.
* `ngram` – a proposer that continues the text as it continued earlier.
* `draft_model` – a proposer with a smaller model.

A *proposer* may propose anything: a draft is accepted only if it equals the token that the sampler picks at its place.
So the output does not depend on the proposer, only the speed does.
"""
