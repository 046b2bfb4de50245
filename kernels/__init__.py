"""Tensor operations of the worker: most have a Triton kernel, a CPU path and a plain torch reference.

`linear` and `decoder` are for CPUs only. The modules from `bench` on are tools, not operations.

One module is one operation (attention, the largest, is a package). Its public function dispatches on the device of its
arguments: CUDA tensors go to the Triton kernel, all others to the CPU path. The kernels are in `gpu`, and those of
sampling and attention in packages of their own; an operation imports them when it first launches one. The function
named ``*_reference`` defines the operation in plain torch, in the precision of its inputs (including float64); tests
compare kernel and CPU path with it. A reference that the self-test of `native` also needs has its own module
(``…_reference``).

    kv_cache          write the new tokens' keys and values into their slots of the paged cache
    paged_attention   attention of a flat batch of rows over the paged KV cache: decode and chunked prefill
    norm              RMSNorm, alone or fused with the preceding residual addition
    rotary            rotary position embedding of queries and keys
    qkv               QK norm, rotary and KV write of a packed projection at once
    fp8               conversion of KV to and from fp8 e4m3
    activation        SiLU-gated product of the MLP
    experts           mixture of experts: routing, and a product of each expert with its tokens
    philox            the counter-based random numbers that sampling draws from
    sampling          temperature, top-k, top-p, min-p, typical-p and the draw of tokens
    block_copy        copies of whole blocks: on the device, or between device and host
    scatter           writes scattered words of a state tensor on the device
    decode_inputs     the inputs of a decode step, computed on the device
    kv_quantised      a KV cache in int8 or fp8, with scales
    linear            matrix products over weights packed for a CPU, also int8 and int4
    decoder           all layers of a Llama-type decoder on a CPU, in one call
    gpu               the Triton kernels of most operations
    native            the optional C++ library of CPU kernels
    bench             measures the kernels against the limits of the device
    compiling         callback before a launch compiles its kernel
    tune              tunes the tiles of the attention kernels on a GPU and writes their table
    aot               compiles all specialisations that the worker uses, without a GPU

The package imports torch and triton, and nothing else of the project. The CPU paths neither need nor import triton.

A package on PyPI with the same import name exists, and ``transformers`` probes for it. This file must therefore define
no ``__version__`` and import nothing, so that the probe (which imports it) does not take this package for the other.
"""
