"""Tensor operations of the worker: each a Triton kernel beside its plain torch reference and its CPU path.

One module is one operation (attention, the largest, is a package). Its public function looks at the device of its
arguments: CUDA tensors go to the Triton kernel, everything else to the CPU path. The function named ``*_reference``
says what the operation *means*, in plain torch and in whatever precision its inputs have (float64 included); tests
hold kernel and CPU path against it. It has a module of its own (``…_reference``) where the self-test of `native`, below
the operations, needs it too.

    kv_cache          write the new tokens' keys and values into their slots of the paged cache
    paged_attention   attention of a flat batch of rows over their pages: decode and chunked prefill
    norm              RMSNorm, alone or fused with the residual addition before it
    rotary            rotary position embedding of queries and keys
    qkv               QK norm, rotary and KV write of a packed projection at once
    fp8               KV in eight bits
    activation        SiLU-gated product of the MLP
    philox            the counter-based random numbers that sampling draws from
    sampling          temperature, top-k, top-p, min-p and the draw itself
    block_copy        whole blocks from pool to pool: copies on the device, swap with the host
    scatter           write scattered words of a state that lives on the device
    decode_inputs     the inputs of a decode step, computed on the device
    linear            products over weights packed for a CPU, int8 among them
    decoder           all layers of a Llama-type decoder on a CPU, in one call
    native            the C++ that the CPU paths run on, where it was built
    bench             what the kernels reach beside the device's ceilings
    compiling         tells when a launch is about to compile its kernel
    tune              measures the attention kernels' tiles on a GPU and writes their table
    aot               compiles every specialisation the worker reaches, without a GPU

The package imports torch and triton and nothing else of the project; without triton the CPU paths still work.

Its import name is also that of a package on PyPI which ``transformers`` probes for. Two things keep the probe
from taking us for it: this file defines no ``__version__``, and it imports nothing (the probe imports it).
"""
