"""The CPU kernels: C++ behind a C ABI, called through ctypes; torch stays the path where they cannot run.

    structures  the C structures, field by field
    library     the library that was built, and the levels of it that this processor runs
    attention   paged attention over the pages where they lie
    sampling    from logits to tokens; the other callers are `kernels.linear` and `kernels.decoder`
    selftest    whether a level computes rightly here
    serving     which level serves: the only module above the operations, which are told the level
    src/        the C++: `format.h` says how numbers lie in memory, `levels.h` what exists once per instruction set,
                `decoder.h` what a model looks like to it; read in that order

It is built when Quire is installed (`setup.py`), if there is a compiler. Three *levels* come from the same templates:
`avx2`, `avx512` (with BF16 and VNNI), and `portable`, which is plain C++ shaped like `avx512` and serves tests. The
best level that the processor has and that passes a self-test is used; without one, operations take their torch path.
The variable ``QUIRE_CPU_KERNELS`` names a level to use, or ``off``.
"""
