"""Commands of the command line that need this package; see `quire_server.cli`."""
