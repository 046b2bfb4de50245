"""The bundled model: a corpus generator, a tokenizer, a trainer and an evaluator.

A machine without a model hub has no weights to serve, so the project makes its own. The modules form a pipeline. Each
is a command of its own (`python -m tools.demo_model.<name>`):

    corpus     seed -> documents: short stories, small arithmetic, facts with questions about them much later
    tokenizer  corpus -> byte-level BPE with single digits, special tokens and a chat template
    train      corpus + tokenizer -> a small checkpoint of the Qwen3 architecture, resumable at any time
    evaluate   checkpoint or any `complete` function -> held-out accuracies and perplexity

The corpus consists of `words`, `stories`, `problems` and `split`. The optimiser is in `muon`.

The tasks make a fault of the server visible in the text. A fact can be recalled only through the KV blocks that hold
it, and a sum is either right or wrong.
"""
