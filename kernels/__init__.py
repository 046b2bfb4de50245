"""Tensor operations of the worker: most have a Triton kernel, a CPU path and a plain torch reference.

`linear`, `gguf` and `decoder` run on CPUs only.

Each module is one operation (attention, the largest, is a package). Its public function dispatches on the device of its
arguments: CUDA tensors go to the Triton kernel, all others to the CPU path. The Triton kernels are in `gpu`, except
those for sampling and attention, which have their own packages. An operation imports its kernels at its first launch.
The function ``*_reference`` defines the operation in plain torch, in the precision of its inputs (including float64).
Tests compare the kernel and the CPU path with the reference. If the self-test in `native` also needs a reference, that
reference has its own module (``…_reference``).

    kv_cache          write the new tokens' keys and values into their slots of the paged cache
    paged_attention   attention for a flat batch of rows over the paged KV cache: decode and chunked prefill
    latent_attention  the same over latent vectors and rotary keys (MLA)
    norm              RMSNorm, alone or fused with the preceding residual addition
    rotary            rotary position embedding for queries and keys
    qkv               QK norm, rotary embedding and KV write for a packed projection, fused
    fp8               conversion of KV to and from fp8 e4m3
    activation        gates of MLPs: SiLU, and the clamped one of gpt-oss
    experts           mixture of experts: routing, and the products of each expert, perhaps with quantised weights
    philox            the counter-based random numbers that sampling draws from
    sampling          temperature, top-k, top-p, min-p, typical-p and the draw of tokens
    block_copy        copies whole blocks on the device, or between device and host
    scatter           writes scattered words of a state tensor on the device
    decode_inputs     computes the inputs of a decode step on the device
    kv_quantised      a KV cache in int8 or fp8, with scales
    linear            matrix products with weights packed for a CPU: float32, bfloat16, int8 or int4
    gguf              the types of GGUF files, packed for `linear` with their own codes
    weight_only       matrix products with quantised weights and 16-bit activations on a GPU: int4, e2m1, int8, e4m3
    fp8_linear        matrix products with weights and activations in e4m3 on a GPU
    decoder           all layers of a Llama-type decoder on a CPU, in one call
    gpu               the Triton kernels of most operations
    native            the optional C++ library of CPU kernels
    compiling         callback that runs before a launch compiles its kernel

The package imports torch and triton, but no other package of Quire. The CPU paths neither need nor import triton.

PyPI has another package with the import name ``kernels``, and ``transformers`` probes for that package by importing it.
This file must therefore define no ``__version__`` and import nothing, so that the probe does not mistake this package
for that one.
"""
