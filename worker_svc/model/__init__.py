"""Decoders that compute logits over the paged KV cache.

* `decoder_config`: the fields of config.json that own code reads
* `config`: properties of any model, from its config.json
* `base`: the interface between a model and the rest of the worker
* `step_graphs`: steps with prompt chunks or drafts as captured CUDA graphs
* `registry`: chooses between the two implementations below
* `families`: the model families of `llama`
* `config_reader`: reads config.json of these families without `transformers`
* `llama`: native implementation of the Llama/Qwen family
* `llama_layer`: one layer's weights
* `llama_packed`: the family on a CPU, with weights packed for the native kernels
* `rope`: its rotary tables
* `weights`: reads safetensors files, one tensor at a time
* `scheme`: how the weights of a quantised checkpoint are stored, from config.json
* `quantised`: weights of a quantised checkpoint, packed as they are stored or dequantised
* `gguf`: reads GGUF files
* `fingerprint`: identifies a loaded model
* `hf`: loads `transformers` decoders, and chooses how they use our paged KV cache
* `hf_model`: what both ways have in common
* `hf_interface`: decoders that call our attention through the attention interface
* `hf_attention`: the attention function that they call
* `hf_cache`: decoders that compute attention themselves; our paged KV cache and row states replace their `Cache`
* `recurrent`: the recurrent states of rows
* `hf_packed`: linear layers with packed weights in `transformers` decoders, on a CPU
* `hf_trial`: compares a decoder's logits with those of the class's own attention
* `loader`: loads a model from a configuration
"""
