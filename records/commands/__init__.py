"""`quire` commands that need the package `records`; see `quire_server.cli`."""
