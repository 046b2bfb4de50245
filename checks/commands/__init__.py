"""Command-line commands in this package; see `quire_server.cli`."""
