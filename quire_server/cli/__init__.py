"""Command line: one module per command, imported only when its command is used.

A command module has a docstring, which is its `--help`, `EXAMPLES`, `configure(parser)` and `run(options) -> exit
code`.
"""
