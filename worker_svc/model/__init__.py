"""Decoders that compute logits over the paged KV cache.

* `config`: what config.json says of the model
* `base`: the contract between a model and the rest of the worker
* `registry`: which of the two paths a model takes
* `llama`: first path, the hand-written Llama/Qwen family
* `llama_layer`: the weights of one of its layers
* `llama_packed`: the family on a CPU, its weights packed for our kernels
* `rope`: rotary tables for it
* `weights`: safetensors files, one tensor at a time
* `fingerprint`: what tells two loaded models apart
* `hf`: second path, decoders of `transformers` on our pages
* `hf_attention`: the attention function that they call
* `loader`: all of it together, a folder in, a loaded model out
"""
