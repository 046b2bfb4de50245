"""Commands of the command line that this package provides; see `quire_server.cli`."""
