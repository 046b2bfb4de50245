"""Commands of `quire` that need the package `records`; see `quire_server.cli`."""
