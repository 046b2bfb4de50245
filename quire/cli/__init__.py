"""The command line: one module per command, imported only when that command is asked for.

A command module has a docstring that becomes its `--help`, `EXAMPLES`, `configure(parser)` and
`run(options) -> exit code`.
"""
