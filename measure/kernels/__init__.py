"""Kernels alone.

`bench` measures, `tune` selects tiles, `aot` compiles without a GPU, `machine_code` reads the compiled code.
"""
