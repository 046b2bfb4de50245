"""Native CPU kernels: C++ with a C ABI, called through ctypes. If the library is missing, operations use torch.

    structures  the C structures, field by field
    library     loads the library, and lists the levels that this processor supports
    attention   paged attention, without gathering the KV blocks
    sampling    samples tokens from logits; `kernels.linear` and `kernels.decoder` also call the library
    recurrent   the gated delta rule, the selective scan of Mamba 2, and causal convolutions
    selftest    checks that a level computes correct results on this machine
    serving     chooses the level to use; callers pass that level to the operations
    src/        the C++: `format.h` (memory layout), `levels.h` (functions per instruction set) and `decoder.h` (the
                model), to be read in that order

The library is built when Quire is installed (`setup.py`), if there is a compiler. Four *levels* are built from the
same templates: `avx2`, `avx512` (with BF16 and VNNI), `amx`, and `portable`, which is plain C++ for tests. `amx` equals
`avx512`, except that it uses tile registers for products with bf16, int8 and int4 weights and for the attention of
prefill chunks. The process uses the best level that the processor supports and that passes a self-test. The environment
variable ``QUIRE_CPU_KERNELS`` forces a level, or disables the library with ``off``.
"""
