"""The embedded model: a corpus generator, a tokenizer, a trainer and an evaluator.

A machine without a model hub has no weights to serve, so the project makes its own. The pieces form one
line, each a command of its own (`python -m tools.demo_model.<name>`):

    corpus     seed -> documents: short stories, small arithmetic, facts asked for again much later
    tokenizer  corpus -> byte-level BPE with single digits, special tokens and a chat template
    train      corpus + tokenizer -> a small Qwen3-architecture checkpoint, resumable at any time
    evaluate   checkpoint or any `complete` function -> held-out accuracies and perplexity

Beside them: `words`, `stories`, `problems` and `split`, of which the corpus is made, and `muon`, the optimiser.

The tasks are chosen so that a serving fault is visible in the text: a fact can only be recalled through the
KV pages that hold it, and a sum is either right or wrong.
"""
