"""Decoders that compute logits over the paged KV cache.

* `decoder_config`: the fields of config.json that own code reads
* `config`: properties of any model, from its config.json
* `base`: the interface between a model and the rest of the worker
* `registry`: chooses between the two implementations below
* `families`: the model families of `llama`
* `config_reader`: reads config.json of these families without `transformers`
* `llama`: native implementation of the Llama/Qwen family
* `llama_layer`: the weights of one of its layers
* `llama_packed`: the family on a CPU, with weights packed for the native kernels
* `rope`: its rotary tables
* `weights`: reads safetensors files, one tensor at a time
* `scheme`: how the weights of a quantised checkpoint are stored, from config.json
* `quantised`: weights of a quantised checkpoint, packed as they are stored or dequantised
* `gguf`: reads GGUF files
* `fingerprint`: identifies a loaded model
* `hf`: loads decoders of `transformers`, and chooses one of the two ways to our paged KV cache
* `hf_model`: what both ways have in common
* `hf_interface`: decoders that call our attention through the attention interface
* `hf_attention`: the attention function that they call
* `hf_cache`: decoders that attend themselves, and whose `Cache` is our paged KV cache and the states of rows
* `recurrent`: the recurrent states of rows
* `hf_packed`: linear layers of decoders of `transformers` with quantised weights, on a CPU
* `hf_trial`: compares their logits with those of their own attention
* `loader`: loads a model from a configuration
"""
