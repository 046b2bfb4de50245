"""Triton kernels of the operations; a module has the name of its operation, whose module launches them.

Importing a module of this package imports triton. So only operations that launch a kernel import one.
"""
